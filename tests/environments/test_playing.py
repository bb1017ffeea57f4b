"""The loop of an episode without tokens: why it ends, and what its callbacks are given."""

from __future__ import annotations

from typing import Any

import pytest

from environments.contract import Action, Observation, Termination
from environments.playing import take_turns

WORD = Action(content="word")


class Limited:
    max_steps = 3


def turns(act: Any, done_after: int, first_done: bool = False, past: bool = False) -> tuple[Termination, int]:
    """Why the episode ended, and how many actions reached the environment, which says `done` after some."""
    taken: list[Action] = []

    def step(action: Action) -> Observation:
        taken.append(action)
        return Observation((), done=len(taken) >= done_after)

    return take_turns(Limited(), Observation((), first_done), act, step, past_the_end=past), len(taken)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ({"done_after": 2}, (Termination.DONE, 2)),
        ({"done_after": 3}, (Termination.DONE, 3)),  # done with the last action that the limit allows
        ({"done_after": 9}, (Termination.MAX_STEPS, 3)),
        ({"done_after": 9, "first_done": True}, (Termination.DONE, 0)),
        ({"done_after": 1, "past": True}, (Termination.MAX_STEPS, 3)),
    ],
)
def test_why_an_episode_ends(given: dict[str, Any], ended: tuple[Termination, int]) -> None:
    assert turns(lambda taken: WORD, **given) == ended


def test_who_acts_may_stop_and_is_told_how_many_actions_were_taken() -> None:
    asked: list[int] = []

    def act(taken: int) -> Action | None:
        asked.append(taken)
        return WORD if taken < 2 else None

    assert turns(act, 9) == (Termination.DONE, 2)
    assert asked == [0, 1, 2]


def test_what_is_raised_reaches_the_caller() -> None:
    def act(taken: int) -> Action:
        raise KeyError("no action")

    with pytest.raises(KeyError, match="no action"):
        turns(act, 9)
