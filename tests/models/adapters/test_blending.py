"""A blend is the weighted sum of adapters, whichever layers and projections each of them changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.adapters.blending import blend, blend_name, blend_parts
from models.adapters.deltas import folder_deltas
from tests.adapters_made import make_adapter


@pytest.mark.parametrize("turned", [False, True])
def test_adapters_of_other_layers_ranks_and_projections_are_all_in_their_sum(
    tiny_model: Any, tmp_path: Path, turned: bool
) -> None:
    model = tiny_model[0].model
    upper = make_adapter(model, tmp_path / "upper", layers=(2,), modules=("q_proj", "v_proj"))
    lower = make_adapter(model, tmp_path / "lower", seed=1, rank=2, layers=(1, 2), modules=("q_proj", "up_proj"))
    weights = {lower: 0.25, upper: 0.5} if turned else {upper: 0.5, lower: 0.25}
    _, mixed = folder_deltas(blend(model, weights, tmp_path / "blend"))
    wanted: dict[str, torch.Tensor] = {}
    for folder, weight in weights.items():
        for name, delta in folder_deltas(folder)[1].items():
            wanted[name] = wanted.get(name, torch.zeros(())) + weight * delta.whole()
    assert mixed.keys() == wanted.keys()
    assert len(wanted) == 5
    for name, delta in mixed.items():
        torch.testing.assert_close(delta.whole(), wanted[name], atol=1e-6, rtol=1e-4)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("shares", "quarters"),
    [
        ({"a": 0.4, "b": 0.4, "c": 0.2}, {"a": 1, "b": 2, "c": 1}),  # 1.6, 1.6 and 0.8: each rounded up, five quarters
        ({"c": 0.2, "b": 0.4, "a": 0.4}, {"a": 1, "b": 2, "c": 1}),
        ({"a": 0.38, "b": 0.41, "c": 0.21}, {"a": 1, "b": 2, "c": 1}),
        ({"a": 0.4, "b": 0.4, "": 0.2}, {"a": 2, "b": 2}),
        ({"a": 0.6, "b": 0.4}, {"a": 2, "b": 2}),
    ],
)
def test_the_quarters_of_a_blend_are_at_most_a_whole(shares: dict[str, float], quarters: dict[str, int]) -> None:
    assert blend_parts(shares) == quarters
    assert blend_name(shares) == "-".join(["blend", *(f"{name}-{n}" for name, n in sorted(quarters.items()))])
