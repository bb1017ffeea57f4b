"""Seeds of a comparison for tests: the letters target, a tiny random model, and stages without Prefect's artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.validation.checks import ValidationVerdict
from models.local.base import BaseModel
from settings import Settings, load_settings
from tasks.methods.preflight import seed_settings
from tasks.methods.seed.seed_run import SeedRun, open_round
from tasks.round.context import Context
from tests.tasks.methods.letters_target import target

BUDGET = 320
ACCEPTED = ValidationVerdict(True, (), {})
TRAIN = {
    "groups": 2, "group_size": 4, "rank": 4, "alpha": 8, "upper_layers": 2, "temperature": 1.0, "micro_batch": 8,
    "learning_rate": 0.02, "candidates": 2, "choosing": 4, "steps": 1, "collections": 2,
    "generalist": 2,
}  # fmt: skip


def small_settings(home: Path, **changes: Any) -> Settings:
    given: dict[str, Any] = {
        "profile": "smoke",
        "target": target.name,
        "home": home,
        "train": TRAIN,
        "rollout": {"max_tokens": 6, "temperature": 0.7, "tasks": 0},
        "selection": {"most": 2, "delta": 0.1},
        "calibration": {"seeds": 4, "samples": 6, "uniform": 1.0, "low": 0.0, "high": 1.0, "informative": 0.1},
        "evaluation": {"trials": 2, "validation_trials": 1, "fresh": 4, "own_tasks": 0},
    }
    return load_settings(**{**given, **changes})


def seed_run(folder: Path, model: Any, seed: int = 7, budget: int = BUDGET, **changes: Any) -> SeedRun:
    """The seed's round, opened with the tiny model; `play_round` is the real order of stages, each done as it is."""
    from flows.compare_methods import play_round

    policy, renderer = model
    context = open_round(
        seed_settings(small_settings(folder / "home", **changes), seed, budget),
        base=BaseModel(policy, renderer, policy.identity()),
    )
    return SeedRun(context, budget, play_round, points=2)


def without_prefect(patch: pytest.MonkeyPatch) -> None:
    """Stages without Prefect: done in place, no artifacts; and no scripted attacks on an environment so simple that a
    scripted policy solves it by chance."""
    from tasks.round.stage import Stage, current

    patch.setattr(Stage, "__call__", lambda self, round_id, *given: self.do(current(round_id), *given))
    for module in ("select", "calibrate", "register", "challenge", "gate"):
        for kind in ("table", "markdown", "link"):
            patch.setattr(f"tasks.{module}.create_{kind}_artifact", lambda *a, **k: None, raising=False)
    patch.setattr("tasks.synthesis.environments.validate_environment", lambda *given, **more: ACCEPTED)


def charged_and_stored(contexts: list[Context]) -> tuple[set[str], set[str]]:
    """Trajectory ids on any account, and those that are stored."""
    charged = {str(i) for c in contexts for i in c.store.query("SELECT trajectory_id AS id FROM episode_charges")["id"]}
    stored = {str(i) for c in contexts for i in c.store.query("SELECT id FROM trajectories")["id"]}
    return charged, stored
