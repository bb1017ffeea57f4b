"""What the first process of a tiny job does: a training on the toy of `test_grpo.py`."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.local.base import BaseModel, load_base
from models.training.actors import LocalActor
from models.training.grpo import train_adapter
from models.training.ranks import fingerprint_of, part_base
from tests.models.training.test_grpo import SMALL, Half, Source

PROBE = tuple(range(5, 60, 3))


class Beside(LocalActor):
    """Samples on another model than is trained, as servers do, and holds the two against each other."""

    def __init__(self, trained: BaseModel, sampler: BaseModel) -> None:
        super().__init__(sampler.policy)
        self.model = trained.policy.model

    def publish(self, step: int, peft: Any) -> str:
        name = super().publish(step, peft)
        expected = fingerprint_of(peft, PROBE)
        for mine, adapter in ((expected.base, None), (expected.adapted, name)):
            theirs = self.policy.score(PROBE, len(mine), adapter)
            assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=1e-3)
        return name


def lead(order: dict[str, Any]) -> int:
    """Train, and say what the steps came to. With `parted` the weights that are trained are spread over the processes;
    also said is what each holds of them."""
    base, folder = load_base(**order["base"]), Path(order["output"])
    held, actor = [], LocalActor(base.policy)
    if order.get("parted"):
        shape = base.policy.model.model.layers[0].mlp.up_proj.weight.shape
        base.policy.score(PROBE, 4)  # arranges the weights
        held = part_base(base)
        gc.collect()
        assert not _whole(shape), "something keeps whole weights"
        actor = Beside(base, load_base(**order["base"]))
    records: list[Any] = []
    settings = replace(SMALL, **order["settings"])
    train = (Source(Half), actor, base.renderer, settings, folder, records.append)
    paused = train_adapter(*train, until=1)  # type: ignore[arg-type]
    made = train_adapter(*train)  # type: ignore[arg-type]
    figures = [[r.loss, r.metrics["grad_norm"], r.metrics["entropy"], r.kl, r.logprob_gap] for r in records]
    (folder / "said.json").write_text(json.dumps([paused.ending, made.ending, figures, str(made.folder), held]))
    return 0


def _whole(shape: Any) -> list[Any]:
    """Tensors of the shape with something in them."""
    plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return [t for t in plain if t.shape == shape and t.untyped_storage().nbytes()]
