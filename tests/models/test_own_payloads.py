"""An environment that keeps its state in its task's payload changes it for no other episode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from environments.contract import Action, Environment, Message, Observation, Score, Target, TargetTask, ToolCall
from environments.synthesized.composed import DenseEnvironment
from environments.synthesized.hints import solved
from environments.synthesized.references import References
from environments.targets.reference_check import oracle, play
from models.episodes import Episode, Guarded, Player, play_all
from models.policy import Sampling
from models.scripted import OraclePolicy, ReplayPolicy


class Keeping:
    """Take what is left, two of three, and stop. What is left is the task's own list."""

    tools: Sequence[Any] = ()
    instructions = "Take."
    examples: Sequence[Message] = ()
    max_steps = 4

    def reset(self, task: TargetTask) -> Observation:
        self.left: list[str] = task.payload["left"]
        return Observation((Message("user", "Take two."),))

    def step(self, action: Action) -> Observation:
        if not action.tool_calls:
            return Observation((), done=True)
        self.left.pop()
        return Observation((Message("tool", "taken"),))

    def oracle(self) -> Action | None:
        return Action(tool_calls=(ToolCall("take", {}),)) if len(self.left) > 1 else Action("Done.")

    def score(self) -> Score:
        return Score(0.5, self.left == ["a"])

    def close(self) -> None: ...


class Copying(Keeping):
    """The same on a list of its own."""

    def reset(self, task: TargetTask) -> Observation:
        first = super().reset(task)
        self.left = list(self.left)
        return first


class KeepingTarget:
    name, licence, data_hash, environment = "keeping", "Apache-2.0", "1", Keeping

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return []


LEFT = ["a", "b", "c"]


def by_player(task: TargetTask) -> object:
    player = Player(Keeping, OraclePolicy(), None, Sampling())
    return [len(t.steps) for t in play_all(player, [Episode(str(n), task, trial=n) for n in range(2)])]


def guarded(task: TargetTask) -> object:
    return play(Guarded.made(Keeping), task, oracle)


def references(task: TargetTask) -> object:
    target: Target = KeepingTarget()
    return References(target).calls(task)


@pytest.mark.parametrize("plays", [by_player, guarded, references, partial(solved, Keeping())])
def test_a_payload_is_what_it_was_when_an_episode_is_over(plays: Callable[[TargetTask], object]) -> None:
    task = TargetTask("t", "test", "f", 0, {"left": list(LEFT)})
    assert plays(task) == plays(TargetTask("t", "test", "f", 0, {"left": list(LEFT)}))
    assert task.payload == {"left": LEFT}


def half_solved(make: Callable[[], Environment]) -> float:
    """The denser reward of one of the reference's two calls."""
    target: Target = KeepingTarget()
    acts = ReplayPolicy((Action(tool_calls=(ToolCall("take", {}),)), Action("Done.")))
    player = Player(lambda: DenseEnvironment(make(), References(target)), acts, None, Sampling())
    (played,) = play_all(player, [Episode("0", TargetTask("t", "test", "f", 0, {"left": list(LEFT)}))])
    assert played.score
    return played.score.reward


def test_the_denser_reward_knows_the_task_as_it_was_before_the_episode() -> None:
    """Scoring replayed the reference from where the agent left off: what was half solved was paid something else."""
    assert half_solved(Keeping) == half_solved(Copying) == 0.25


def test_trials_of_a_task_begin_alike() -> None:
    assert by_player(TargetTask("t", "test", "f", 0, {"left": list(LEFT)})) == [3, 3]


def test_a_payload_that_cannot_be_copied_costs_its_own_episode() -> None:
    task = TargetTask("t", "test", "f", 0, {"left": threading.Lock()})
    (lost,) = play_all(Player(Keeping, OraclePolicy(), None, Sampling()), [Episode("0", task)])
    assert lost.boundary == "environment"
    assert lost.error.startswith("the payload of task 't' cannot be copied (TypeError: ")
    assert lost.error.endswith("give JSON")
