"""What an environment gives or raises beside what `test_episodes` has: none of it may end what is played beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from environments.contract import Message, Observation, TargetTask, Termination, ToolCall
from models.episodes import Episode, Player, play_all
from models.policy import Sampling
from models.scripted import NoopPolicy
from tests.models.test_episodes import Change, Plain, giving, played, raising


def cancelled(*_: Any) -> Any:
    raise asyncio.CancelledError


class PanicException(BaseException):
    """As what pyo3 raises for a panic of Rust's."""


def panics(*_: Any) -> Any:
    raise PanicException("index out of bounds")


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError


def wordless(*_: Any) -> Any:
    raise Wordless


def said(message: Any, done: Any = False) -> Change:
    return giving("step", Observation((message,), done))


def called(**call: Any) -> Change:
    return said(Message("assistant", "", (ToolCall(**({"name": "f", "arguments": {}} | call)),)))


FAULTS: dict[str, tuple[Change, str]] = {
    "what it waits for is cancelled": (raising("step", cancelled), "step raised CancelledError"),
    "Rust panics": (raising("step", panics), "step raised PanicException: index out of bounds"),
    "an error has no text": (raising("score", wordless), "score raised Wordless, whose text cannot be made"),
    "an argument is NaN": (called(arguments={"a": float("nan")}), "no JSON"),
    "half a character as an id": (called(id="\ud800"), "not Unicode"),
    "half a character as a tool": (called(name="\ud800"), "not Unicode"),
    "a call without a comma": (
        said(Message("assistant", "", ToolCall("f", {}))),
        "its calls as a ToolCall; give a tuple",
    ),  # type: ignore[arg-type]
    "calls that are read once": (
        said(Message("assistant", "", (call for call in [ToolCall("f", {})]))),  # type: ignore[arg-type]
        "its calls as a generator",
    ),
    "a name that is no text": (said(Message("tool", "x", name=len)), "as the name; give a text"),  # type: ignore[arg-type]
    "an id that is no text": (said(Message("tool", "x", tool_call_id=5)), "5 as the tool_call_id"),  # type: ignore[arg-type]
    "over in words": (said(Message("user", "x"), "False"), "gave done 'False'; give True or False"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_costs_its_own_episode(name: str) -> None:
    change, words = FAULTS[name]
    changed, others = played(change)
    assert (changed.score, changed.termination, changed.boundary) == (None, Termination.ERROR, "environment")
    assert words in changed.error
    assert all(t.score is not None for t in others)


def test_beside_sampled_ones_as_well(tiny_model: Any) -> None:
    changes = {f"{i}": change for i, (change, _) in enumerate(FAULTS.values())}
    tasks = [TargetTask(f"{i}", "test", "plain", 0) for i in range(len(changes) + 3)]
    player = Player(lambda: Plain(changes), *tiny_model, Sampling(1.0, 6), window=5)
    trajectories = play_all(player, [Episode(t.id, t) for t in tasks])
    assert [bool(t.score) for t in trajectories] == [False] * len(changes) + [True] * 3


@pytest.mark.parametrize("done", [np.bool_(True), True])
def test_an_end_may_be_numpys(done: Any) -> None:
    changed, _ = played(giving("step", Observation((), done)))
    assert (changed.termination, len(changed.steps)) == (Termination.DONE, 1)


def test_no_id_may_be_none() -> None:
    changed, _ = played(said(Message("tool", "x", tool_call_id=None)))  # type: ignore[arg-type]
    assert changed.score is not None


@pytest.mark.parametrize("policy", ["scripted", "sampled"])
def test_an_environment_without_close_is_told_and_costs_nothing(
    policy: str, tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Open:
        """All of `Plain` but its `close`."""

        def __init__(self) -> None:
            self.inner = Plain({})

        def __getattr__(self, name: str) -> Any:
            if name == "close":
                raise AttributeError("no close")
            return getattr(self.inner, name)

    make: Any = Open
    player = Player(make, *((NoopPolicy(), None) if policy == "scripted" else tiny_model), Sampling(1.0, 6))
    tasks = [TargetTask(f"{i}", "test", "plain", 0) for i in range(3)]
    assert all(t.score for t in play_all(player, [Episode(t.id, t) for t in tasks]))
    assert "the environment's close raised AttributeError: no close" in caplog.text


def test_a_person_who_stops_the_process_stops_it() -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        played(raising("step", stop))
