"""Validation and episodes give one verdict on a score."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from environments.contract import Check, Message, Observation, Score, TargetTask
from environments.scores import checked_score
from environments.validation.playing import play
from models.episodes import Episode, Player
from models.policy import Sampling
from models.scripted import NoopPolicy

# Both are given what the types forbid.
given: Any = Score
a_check: Any = Check
CHECK = a_check("n", "k", True, True)
TASK = TargetTask("t", "test", "f", 0)
GOOD: list[Any] = [
    given(0, False),
    given(1.0, True, (CHECK,), {"ratio": 0.5}),
    given(sum([1 / 9] * 9), True),
    given(0.3 - 0.2 - 0.1, False),
    given(np.float32(0.7) + np.float32(0.3), True),
    given(np.float32(0.25), np.bool_(True)),
    given(np.float64(0.25), False, [CHECK], {"steps": np.int64(3)}),
    given(np.int64(1), True, (a_check("n", "k", np.bool_(True), np.bool_(False)),)),
]
BAD: list[Any] = [
    None,
    1.0,
    *(given(reward, False) for reward in (True, np.bool_(True), 1.5, -0.1, np.float32(2), float("nan"), "1", None)),
    *(given(0.5, success) for success in (1, None, "yes", np.int64(1))),
    *(given(0.5, True, (), metrics) for metrics in ([1.0], None, {"a": float("inf")}, {"a": "1"}, {1: 1.0})),
    *(given(0.5, True, checks) for checks in (None, ("n",), (a_check("n", "k", True, 0.5),))),
    given(0.5, True, (a_check("n", None, True, True),)),
]


@pytest.mark.parametrize(("score", "sound"), [*((s, True) for s in GOOD), *((s, False) for s in BAD)])
def test_a_score_is_sound_for_validation_where_it_is_for_an_episode(score: Any, sound: bool) -> None:
    environment: Any = SimpleNamespace(
        tools=(),
        instructions="",
        examples=(),
        max_steps=1,
        reset=lambda task: Observation((Message("user", "hello"),)),
        step=lambda action: Observation((), done=True),
        score=lambda: score,
        close=lambda: None,
    )
    (trajectory,) = Player(lambda: environment, NoopPolicy(), None, Sampling()).play([Episode("e", TASK)])
    validated = play(environment, TASK, lambda *_: None)
    assert (validated.score is not None) == (trajectory.score is not None) == sound, validated.error
    assert validated.score == trajectory.score
    assert type(getattr(validated.score, "reward", 0.0)) in (int, float)
    assert (validated.error in trajectory.error) or not sound


@pytest.mark.parametrize(("reward", "kept"), [(1.0000000000000002, 1.0), (-2.8e-17, 0.0), (0.999, 0.999), (0, 0)])
def test_a_reward_that_rounding_put_outside_is_at_its_bound(reward: float, kept: float) -> None:
    assert checked_score(Score(reward, False)).reward == kept
