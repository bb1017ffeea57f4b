"""A step that goes on collecting while no group is informative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from environments.contract import Observation, TargetTask
from models.policy import Request
from models.training.actors import LocalActor
from models.training.rollouts import SEEDS, NothingToLearn, OutOfEpisodes, Rollouts
from tests.models.training.test_grpo import SMALL, Source, Toy


class Late(Toy):
    """The scenarios of a step's first six groups give equal rewards."""

    def reset(self, task: TargetTask) -> Observation:
        self.uniform = task.seed % SEEDS < 6
        return super().reset(task)


class Few(Source):
    """Draws from two tasks, as training on the target's own few draws some of them twice."""

    def scenario(self, seed: int) -> TargetTask:
        return super().scenario(seed % 2)


def test_a_task_that_is_drawn_twice_in_a_step_is_sampled_by_other_random_numbers(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    asked: list[tuple[int, int | None]] = []
    submit = policy.submit

    def heard(request: Request) -> None:
        asked.append((request.prompt[-3], request.sampling.seed))
        submit(request)

    policy.submit = heard
    settings = replace(SMALL, steps=1, groups=2, collections=3, patience=0)
    rollouts = Rollouts(Few(Late), LocalActor(policy), renderer, settings, lambda *given: None)
    rollouts.adapter = None  # type: ignore[assignment]  # the base itself
    try:
        with pytest.raises(NothingToLearn):
            rollouts.collect(0)
    finally:
        policy.submit = submit
    seeds = [seed for _, seed in asked]
    assert len(seeds) >= 3 * 2 * SMALL.group_size
    assert len(set(seeds)) == len(seeds)


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
