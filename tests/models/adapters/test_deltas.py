"""Deltas of an adapter's folder are what PEFT makes of it, or the folder is refused: nothing in it is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from errors import AdapterError
from models.adapters.deltas import folder_deltas, lora_deltas
from models.adapters.files import CONFIG, WEIGHTS, export_adapter


class Layers(nn.Module):
    """Two linear layers and an embedding, by the names that they have in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.q_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.o_proj(self.q_proj(self.embed(x)))


def adapter(folder: Path, modules: list[str], **given: Any) -> tuple[Path, Any]:
    """A folder as PEFT writes it, and the PEFT model that it is of."""
    from peft import LoraConfig, get_peft_model

    peft: Any = get_peft_model(Layers(), LoraConfig(r=2, lora_alpha=4, target_modules=modules, **given))
    with torch.no_grad():
        for name, weight in peft.named_parameters():
            if "lora_" in name:
                weight.fill_(0.5)
    peft.save_pretrained(str(folder / "saved"), safe_serialization=True)
    return export_adapter(folder / "saved", folder / "adapter"), peft


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"o_proj": 1}, "alpha_pattern": {"o_proj": 8}},
        {"rank_pattern": {"q_proj": 1}},
        {"alpha_pattern": {"proj": 1, ".*_proj": 16}},
    ],
)
def test_a_folder_has_the_deltas_of_the_live_adapter(tmp_path: Path, given: dict[str, Any]) -> None:
    folder, peft = adapter(tmp_path, ["q_proj", "o_proj"], **given)
    read, live = folder_deltas(folder)[1], lora_deltas(peft)
    assert read.keys() == live.keys()
    for name, delta in live.items():
        torch.testing.assert_close(read[name].whole(), delta.whole())


def test_an_adapter_of_which_a_part_would_be_left_out_is_refused(tmp_path: Path) -> None:
    folder, _ = adapter(tmp_path, ["q_proj", "embed"])
    with pytest.raises(AdapterError, match="holds 4 tensors, of which lora_A and lora_B of 1 linear layers"):
        folder_deltas(folder)
    weights = load_file(folder / WEIGHTS)
    save_file({name: t for name, t in weights.items() if "lora_embedding" not in name}, folder / WEIGHTS)
    assert len(folder_deltas(folder)[1]) == 1


@pytest.mark.parametrize("change", [{"lora_alpha": None}, {"r": 0}, {"r": "2"}, {"alpha_pattern": {"q_proj": None}}])
def test_a_configuration_without_rank_or_alpha_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder, _ = adapter(tmp_path, ["q_proj"])
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(AdapterError, match="which is no number above 0"):
        folder_deltas(folder)
