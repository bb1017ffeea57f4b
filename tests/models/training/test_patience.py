"""A step that goes on collecting while no group is informative, and what it draws and says where none is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Action, Observation, Score, TargetTask
from environments.sandbox.workers import ModuleError
from errors import LimitReached, TrainingError, Untrainable
from models.policy import Request
from models.training.actors import LocalActor
from models.training.checkpoints import last_whole_checkpoint
from models.training.grpo import TrainingResult, train_adapter
from models.training.rollouts import SEEDS, NothingToLearn, OutOfEpisodes, PlayedBefore, Rollouts
from tests.models.training.test_grpo import SMALL, Source, Toy


class Late(Toy):
    """The scenarios of a step's first six groups give equal rewards."""

    def reset(self, task: TargetTask) -> Observation:
        self.uniform = task.seed % SEEDS < 6
        return super().reset(task)


class GoneLater(Toy):
    """The world is gone after the first step, but for the first scenario of a step: all succeed in that."""

    def reset(self, task: TargetTask) -> Observation:
        self.later, self.place = task.seed // SEEDS, task.seed % SEEDS
        return super().reset(task)

    def step(self, action: Action) -> Observation:
        if self.later and self.place:
            raise ConnectionError("the world is gone")
        return super().step(action)

    def score(self) -> Score:
        return Score(1.0, True) if self.later else super().score()


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


def test_a_few_equal_groups_among_lost_ones_end_no_training(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    with pytest.raises(TrainingError, match=r"5 of 6 groups lost an episode .* ConnectionError: the wor") as raised:
        train_adapter(Source(GoneLater), LocalActor(policy), renderer, SMALL, tmp_path, lambda _: None)
    assert raised.value.transient
    assert not (tmp_path / "ended.json").exists()
    assert last_whole_checkpoint(tmp_path) is not None


class Faulty(GoneLater):
    """The same of a written module that raises: it will do so whenever it is asked."""

    since = 1

    def step(self, action: Action) -> Observation:
        if self.later >= self.since and self.place:
            raise ModuleError("KeyError: 'slot'")
        return Toy.step(self, action)


class FaultyAtOnce(Faulty):
    since = 0

    def score(self) -> Score:
        return Score(1.0, True)


def test_groups_that_a_module_loses_are_lost_for_good_and_end_its_training_alone(
    tiny_model: Any, tmp_path: Path
) -> None:
    """Tried again they would be lost again, whenever the round is gone on with. What was learnt before is kept."""
    policy, renderer = tiny_model

    def trained(kind: type[Toy]) -> TrainingResult:
        folder = tmp_path / kind.__name__
        return train_adapter(Source(kind), LocalActor(policy), renderer, SMALL, folder, lambda _: None)

    result = trained(Faulty)
    said = "1 groups had equal rewards; 5 lost an episode to what its module raises each time, the last to: KeyError:"
    assert said in result.ending
    assert (result.last, result.verdict) == (1, "")
    assert trained(Faulty).ending == result.ending
    with pytest.raises(Untrainable, match=r"step 0: 1 groups .* 5 lost .* KeyError: 'slot'; mend the environment's"):
        trained(FaultyAtOnce)


class Allowing(Few):
    """Grants so many episodes, and keeps what was asked for."""

    def __init__(self, most: int) -> None:
        super().__init__(Late)
        self.most, self.asked = most, list[int]()

    def allow(self, episodes: int, seed: int) -> None:
        self.asked.append(episodes)
        if episodes > self.most:
            raise LimitReached("enough")


def test_a_step_is_allowed_once_before_its_first_episode(tiny_model: Any) -> None:
    """Amid a step nothing is asked: what it has played would be played again."""
    policy, renderer = tiny_model
    for most in (8, 7):
        source = Allowing(most)
        rollouts = Rollouts(source, LocalActor(policy), renderer, SMALL, lambda *given: None)
        rollouts.adapter = None  # type: ignore[assignment]  # the base itself
        with pytest.raises(NothingToLearn if most == 8 else LimitReached):
            rollouts.collect(0)
        assert (source.asked, rollouts.played) == ([8], 24 if most == 8 else 0)


class Kept(Source):
    """Of six scenarios running the last two are there for retention."""

    def own(self, task: TargetTask) -> bool:
        return task.seed % 6 < 4


@pytest.mark.parametrize(("ready", "begun", "owed"), [(0, 0, 6), (3, 3, 3), (4, 4, 2), (6, 4, 2)])
def test_groups_that_were_played_before_take_no_place_of_retention_scenarios(
    tiny_model: Any, ready: int, begun: int, owed: int
) -> None:
    policy, renderer = tiny_model
    settings, asked = replace(SMALL, groups=6, collections=1), list[int]()
    source = Kept()
    source.allow = lambda episodes, seed: asked.append(episodes)  # type: ignore[attr-defined]
    plain = Rollouts(Kept(), LocalActor(policy), renderer, settings, lambda *given: None)
    plain.adapter = None  # type: ignore[assignment]
    groups = [plain.collect(0)[:4] for _ in range(ready)]
    made = Rollouts(source, LocalActor(policy), renderer, settings, lambda *given: None, PlayedBefore(groups))
    made.adapter = None  # type: ignore[assignment]
    learnt = made.collect(0)
    assert len(learnt) == 6 * 4
    assert (asked, made.played) == ([4 * owed], 4 * owed)
    assert [t.episode.key for group in groups[:begun] for t in group] == [t.episode.key for t in learnt[: 4 * begun]]
    assert {t.episode.task.seed for t in learnt if not source.own(t.episode.task)} == {4, 5}
    # In later steps nothing was played before.
    made.collect(1)
    assert made.played == 4 * owed + 24
