"""Difficulty in training: raised and lowered by the step before, the same after a process died."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from environments.contract import Observation, Score, TargetTask
from errors import TrainingError
from models.episodes import Trajectory
from models.training.actors import LocalActor
from models.training.grpo import train_adapter
from models.training.records import (
    EASIER,
    HARDER,
    Dialled,
    GroupFigures,
    StepRecord,
    following_level,
    levels_of,
    misspecified,
    solved,
)
from tasks.synthesis.choosing import candidates
from tests.models.training.test_grpo import SMALL, Source, Toy


class Graded(Toy):
    """Its success is given by the level that the task names; its reward varies, so that there is something to learn,
    unless the level is dull: there every episode earns the same."""

    wins: tuple[bool, ...] = ()
    dull: tuple[int, ...] = ()

    def reset(self, task: TargetTask) -> Observation:
        self.level = int(task.family)
        return super().reset(task)

    def score(self) -> Score:
        win = self.wins[self.level]
        reward = float(win) if self.level in self.dull else (sum(map(ord, self.said)) % 7) / 7
        return Score(reward, win)


class Levels(Source):
    """A toy source with as many levels as `wins`, at each of which every episode succeeds or none does."""

    def __init__(self, wins: tuple[bool, ...], level: int = 0, dull: tuple[int, ...] = ()) -> None:
        super().__init__(type("Made", (Graded,), {"wins": wins, "dull": dull}))
        self.level, self.levels = level, len(wins)

    def at(self, level: int) -> Self:
        other = copy.copy(self)
        other.level = level
        return other

    def scenario(self, seed: int) -> TargetTask:
        return TargetTask(f"toy-{seed}-{self.level}", "training", str(self.level), seed)


def record(level: int, wins: int, step: int = 1, reward: float = 0.5) -> StepRecord:
    groups = (GroupFigures(True, 10, wins, reward), GroupFigures(True, 10, wins, reward))
    return StepRecord(step, 0.0, 0.0, 0.0, 0.0, 0.0, groups, {"level": float(level)})


@pytest.mark.parametrize(
    ("level", "wins", "then"), [(0, 5, 0), (0, 6, 1), (1, 10, 2), (2, 10, 2), (2, 2, 1), (1, 3, 1), (0, 0, 0)]
)
def test_the_next_level_keeps_success_near_one_half(level: int, wins: int, then: int) -> None:
    assert following_level(record(level, wins), 3) == then
    assert EASIER < 0.5 < HARDER


def test_a_step_that_lost_every_own_episode_changes_nothing_and_a_source_without_levels_has_one() -> None:
    assert following_level(replace(record(1, 0), groups=()), 3) == 1
    assert not isinstance(Source(), Dialled)
    assert levels_of(Source()) == (0, 1)
    assert levels_of(Levels((True, False), 1)) == (1, 2)


def trained(model: Any, source: Levels, output: Path, steps: int, seen: list[StepRecord], dies: int = 0) -> Any:
    """Levels by step, and the tasks of all episodes by key."""
    policy, renderer = model
    played: dict[str, str] = {}

    def on_step(done: StepRecord) -> None:
        if done.step == dies:
            raise InterruptedError
        seen.append(done)

    def on_trajectories(step: int, found: list[Trajectory]) -> None:
        assert not played.keys() & {t.episode.key for t in found}
        played.update({t.episode.key: t.episode.task.id for t in found})

    settings = replace(SMALL, steps=steps, collections=1)
    result = train_adapter(
        source, LocalActor(policy), renderer, settings, output, on_step, on_trajectories=on_trajectories
    )
    return result, played


def test_the_level_follows_success_and_is_the_same_after_a_process_died(tiny_model: Any, tmp_path: Path) -> None:
    source = Levels((True, True, False))
    whole: list[StepRecord] = []
    result, played = trained(tiny_model, source, tmp_path / "whole", 4, whole)
    assert [r.level for r in whole] == [0, 1, 2, 1]
    assert result.ending == "steps"  # solved at levels below the top is not solved
    cut: list[StepRecord] = []
    with pytest.raises(InterruptedError):
        trained(tiny_model, source, tmp_path / "cut", 4, cut, dies=3)
    again, rest = trained(tiny_model, source, tmp_path / "cut", 4, cut)
    assert [r.level for r in cut] == [0, 1, 2, 1]
    assert [r.level for r in again.records] == [0, 1, 2, 1]
    assert rest == {key: task for key, task in played.items() if key.partition("/")[0] in ("2", "3")}
    assert all(key.endswith(f"/level{task[-1]}") for key, task in played.items())


def test_a_mastered_level_is_followed_by_a_harder_one_in_the_same_step(tiny_model: Any, tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    result, played = trained(tiny_model, Levels((True, False), dull=(0,)), tmp_path, 1, seen)
    assert (result.ending, [r.level for r in seen]) == ("steps", [1])
    assert {task[-1] for task in played.values()} == {"0", "1"}


def test_a_training_ends_where_no_level_tells_anything(tiny_model: Any, tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    result, played = trained(tiny_model, Levels((True, True), dull=(0, 1)), tmp_path, 2, seen)
    assert (result.ending, seen) == ("mastered", [])
    assert {task[-1] for task in played.values()} == {"0", "1"}  # each level once


@pytest.mark.parametrize(("wins", "level"), [((True, False), 1), ((True, False), 0), ((True, False, False), 1)])
def test_an_easier_level_that_is_solved_masters_nothing(
    tiny_model: Any, tmp_path: Path, wins: tuple[bool, ...], level: int
) -> None:
    """All levels give equal rewards; whether it begins at the easiest one or turns to it, a harder one is unsolved."""
    with pytest.raises(TrainingError, match="make the reward denser"):
        trained(tiny_model, Levels(wins, level, dull=(0, 1, 2)), tmp_path, 2, [])
    assert not (tmp_path / "ended.json").exists()


def test_what_is_said_of_a_training_compares_a_level_with_itself() -> None:
    high = [record(0, 10, 1), record(1, 10, 2)]
    assert not solved(high, 0.95, top=1)
    assert solved([*high, record(1, 10, 3)], 0.95, top=1)
    # Reward is up and success is not: within a level that is a flaw of the reward, across levels it is the dial.
    rising = [record(0, 3, n, 0.3) for n in (1, 2, 3)] + [record(0, 3, n, 0.8) for n in (4, 5, 6)]
    assert misspecified(rising).startswith("reward-misspecified")
    dialled = [*rising[:3], *(replace(r, metrics={"level": 1.0}) for r in rising[3:])]
    assert misspecified(dialled) == ""


def test_checkpoints_of_the_hardest_level_are_compared() -> None:
    records = [record(0, 5, 1), record(0, 10, 2), record(1, 4, 3), record(1, 5, 4)]
    assert candidates(records, 2) == [3, 4]
    assert candidates(records, 4) == [2, 3, 4]
