"""A step that goes on collecting while no group is informative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from environments.contract import Observation, TargetTask
from models.training.actors import LocalActor
from models.training.rollouts import SEEDS, NothingToLearn, OutOfEpisodes, Rollouts
from tests.models.training.test_grpo import SMALL, Source, Toy


class Late(Toy):
    """The scenarios of a step's first six groups give equal rewards."""

    def reset(self, task: TargetTask) -> Observation:
        self.uniform = task.seed % SEEDS < 6
        return super().reset(task)


def test_a_patient_step_collects_until_a_group_is_informative(tiny_model: Any) -> None:
    policy, renderer = tiny_model

    def collected(patience: int, most: int | None = None) -> Rollouts:
        settings = replace(SMALL, steps=1, groups=2, collections=2, patience=patience, most_episodes=most)
        rollouts = Rollouts(Source(Late), LocalActor(policy), renderer, settings, lambda *given: None)
        rollouts.adapter = None  # type: ignore[assignment]  # the base itself
        rollouts.collect(0)
        return rollouts

    patient = collected(5)
    assert (patient.played, patient.dropped) == (4 * 2 * 4, 6), "and not longer than that"
    with pytest.raises(NothingToLearn, match="no informative group in 3 collections"):
        collected(1)
    with pytest.raises(OutOfEpisodes):
        collected(5, most=24)
