"""What the first process of a tiny job does: a training on the toy of `test_grpo.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.local.base import load_base
from models.training.actors import LocalActor
from models.training.grpo import train_adapter
from tests.models.training.test_grpo import SMALL, Half, Source


def lead(order: dict[str, Any]) -> int:
    """Train, and say what the steps came to."""
    base, folder = load_base(**order["base"]), Path(order["output"])
    records: list[Any] = []
    settings = replace(SMALL, **order["settings"])
    train = (Source(Half), LocalActor(base.policy), base.renderer, settings, folder, records.append)
    paused = train_adapter(*train, until=1)  # type: ignore[arg-type]
    made = train_adapter(*train)  # type: ignore[arg-type]
    figures = [[r.loss, r.metrics["grad_norm"], r.metrics["entropy"], r.kl, r.logprob_gap] for r in records]
    (folder / "said.json").write_text(json.dumps([paused.ending, made.ending, figures, str(made.folder)]))
    return 0
