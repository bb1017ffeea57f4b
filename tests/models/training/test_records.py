"""What the records of a training say: own and retention apart, solved, and a reward that parts from success."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from models.training.actors import LocalActor
from models.training.checkpoints import COMPLETE, ENDED, Ended, last_whole_checkpoint, read_ended, write_ended
from models.training.grpo import train_adapter
from models.training.records import (
    GroupFigures,
    StepRecord,
    TrainingSettings,
    figures_apart,
    misspecified,
    over,
    solved,
    verdict_on,
)
from settings_parts import CLIPPED
from tests.models.training.test_grpo import SMALL, Source


def group(reward: float, success: float, own: bool = True, episodes: int = 8) -> GroupFigures:
    return GroupFigures(own, episodes, round(success * episodes), reward)


def record(step: int, *groups: GroupFigures) -> StepRecord:
    return StepRecord(step, 0.1, 0.0, 0.0, 0.0, 1.0, groups)


def test_own_and_retention_scenarios_are_counted_apart_by_episodes() -> None:
    groups = (group(0.5, 0.25), group(1.0, 1.0, episodes=4), group(0.9, 0.75, own=False))
    assert figures_apart(groups) == pytest.approx(
        {
            "own_episodes": 12,
            "own_reward": (8 * 0.5 + 4) / 12,
            "own_success": 6 / 12,
            "retention_episodes": 8,
            "retention_reward": 0.9,
            "retention_success": 0.75,
        }
    )
    assert (record(1, *groups).reward, record(1, *groups).success) == (pytest.approx(8 / 12), 0.5)
    nothing = record(1, group(0.9, 0.75, own=False))
    assert (nothing.reward, nothing.success) == (None, None)  # never 0: nothing was seen
    assert "own_success" not in figures_apart(nothing.groups)


def test_a_training_that_is_not_judged_goes_on_where_reward_parts_from_success() -> None:
    """A baseline has no environment to send back: it would forfeit its budget."""
    misled, settings = [apart(i, r, 0.125) for i, r in enumerate([0.2, 0.3, 0.48])], TrainingSettings(steps=40)
    assert over(misled, settings, 1) == "misspecified"
    alone = replace(settings, judged=False)
    assert (over(misled, alone, 1), verdict_on(misled, alone)) == ("", "")
    assert settings.as_json() | {"judged": True} == asdict(settings), "stored as it was before there was a choice"
    assert alone.as_json() == asdict(alone)


def test_a_record_is_read_back_as_it_was() -> None:
    written = record(3, group(0.5, 0.25), group(0.9, 0.75, own=False))
    assert StepRecord.read(json.loads(json.dumps(asdict(written)))) == written


def test_solved_is_about_own_scenarios_in_two_steps_running() -> None:
    full, most = group(1.0, 1.0), group(0.95, 0.875)
    other = group(0.0, 0.0, own=False)
    assert solved([record(1, full, other), record(2, full, other)], 0.95)  # failing at retention is no matter here
    assert not solved([record(1, full)], 0.95)
    assert not solved([record(1, full), record(2, full), record(3, most)], 0.95)
    assert not solved([record(1, full), record(2, other)], 0.5)


def apart(step: int, reward: float, success: float) -> StepRecord:
    """Three own scenarios around a mean, and a retention scenario that does well throughout."""
    own = [group(min(1.0, reward + d), success) for d in (-0.05, 0.0, 0.05)]
    return record(step, *own, group(1.0, 1.0, own=False))


def test_a_reward_that_parts_from_success_is_named_from_three_records_on() -> None:
    rewards = [0.2, 0.3, 0.48]
    misled = [apart(i, r, 0.125) for i, r in enumerate(rewards)]
    assert misspecified(misled).startswith("reward-misspecified: reward rose by 0.28 while success rose by 0.00")
    assert not misspecified(misled[:2])  # in one step a reward may rise before success follows
    assert misspecified([misled[0], misled[2]], 2)  # a training of two steps has no third
    assert not misspecified(misled[:1], 1)
    learning = [apart(i, r, s) for i, (r, s) in enumerate([(0.2, 0.125), (0.3, 0.25), (0.48, 0.375)])]
    assert not misspecified(learning)
    assert not misspecified([apart(i, 0.3, 0.1) for i in range(9)])


def test_retention_scenarios_neither_hide_nor_feign_it() -> None:
    falling = [(0.2, 1.0), (0.3, 0.6), (0.48, 0.0)]
    hidden = [
        record(i, group(r, 0.0), group(r + 0.02, 0.0), group(s, s, own=False)) for i, (r, s) in enumerate(falling)
    ]
    assert misspecified(hidden)
    feigned = [
        record(i, group(0.3, 0.25), group(0.32, 0.25), group(r, 0.0, own=False)) for i, r in enumerate([0.0, 0.5, 1.0])
    ]
    assert not misspecified(feigned)


def test_one_scenario_a_step_cannot_tell() -> None:
    assert not misspecified([record(i, group(r, 0.0)) for i, r in enumerate([0.1, 0.3, 0.5])])


def training(
    rng: random.Random, success: Callable[[int], float], near: Callable[[int], float], own: int, spread: float
) -> list[StepRecord]:
    """Four steps of `own` groups of eight: each scenario has a difficulty and a worth of its near misses, which varies
    by `spread`; `success` and `near` are by step."""
    records = []
    for step in range(4):
        groups = []
        for _ in range(own):
            logit = math.log(success(step) / (1 - success(step))) + rng.gauss(0, 1)
            worth = min(0.49, max(0.0, near(step) + rng.gauss(0, spread)))
            wins = [rng.random() < 1 / (1 + math.exp(-logit)) for _ in range(8)]
            rewards = [1.0 if won else worth * (rng.random() < 0.7) for won in wins]
            groups.append(GroupFigures(True, 8, sum(wins), sum(rewards) / 8))
        records.append(record(step + 1, *groups))
    return records


def alarms(success: Callable[[int], float], near: Callable[[int], float], own: int = 3, spread: float = 0.1) -> float:
    """Share of 500 trainings that are called misspecified at any step."""
    rng = random.Random(5)
    found = 0
    for _ in range(500):
        records = training(rng, success, near, own, spread)
        found += any(misspecified(records[:n]) for n in range(1, 5))
    return found / 500


def test_noise_and_learning_raise_no_alarm_and_near_misses_do() -> None:
    assert alarms(lambda step: 0.3, lambda step: 0.2) <= 0.01  # nothing changes
    assert alarms(lambda step: 0.05, lambda step: 0.2) <= 0.01
    # Near misses of some scenarios are worth much and of others nothing: without the interval 7 % would be called.
    assert alarms(lambda step: 0.02, lambda step: 0.25, own=2, spread=0.4) <= 0.03
    assert alarms(lambda step: (0.05, 0.1, 0.3, 0.6)[step], lambda step: 0.1 + 0.08 * step) <= 0.02
    assert alarms(lambda step: 0.02, lambda step: (0.0, 0.1, 0.45, 0.49)[step]) >= 0.75


def test_a_bound_of_the_ratio_is_above_the_clip_of_positive_advantages() -> None:
    assert 1 + TrainingSettings().clip_high == CLIPPED


def test_a_training_goes_on_from_the_last_checkpoint_whose_records_are_there(tmp_path: Path) -> None:
    """A power cut may leave a file that was just renamed empty: it counts as never written."""
    records = [record(step) for step in (1, 2)]
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / COMPLETE).write_text(json.dumps([asdict(r) for r in records[:step]]))
    assert last_whole_checkpoint(tmp_path) == (tmp_path / "checkpoint-2", records)
    (tmp_path / "checkpoint-2" / COMPLETE).write_text("")
    assert last_whole_checkpoint(tmp_path) == (tmp_path / "checkpoint-1", records[:1])
    (tmp_path / "checkpoint-1" / COMPLETE).write_bytes(b"\0" * 40)
    assert last_whole_checkpoint(tmp_path) is None


def test_a_training_whose_ending_is_gone_has_not_ended(tmp_path: Path) -> None:
    write_ended(tmp_path, Ended("mastered"))
    assert read_ended(tmp_path) == Ended("mastered")
    (tmp_path / ENDED).write_text("")
    assert read_ended(tmp_path) is None


def test_a_clock_that_was_set_back_costs_no_checkpoint(tiny_model: Any, tmp_path: Path) -> None:
    """Those from before it are from the future: the newest of all, by their time."""

    def set_back() -> None:
        for place, folder in enumerate(sorted(tmp_path.glob("checkpoint-*"))):
            os.utime(folder, (time.time() + 3600 + 60 * place,) * 2)

    policy, renderer = tiny_model
    settings = replace(SMALL, steps=4)
    result = train_adapter(
        Source(), LocalActor(policy), renderer, settings, tmp_path, lambda _: None, on_saved=set_back
    )
    assert (result.last, result.ending) == (4, "steps")
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
