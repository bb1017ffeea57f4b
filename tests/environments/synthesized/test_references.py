"""What a target's reference solutions call: replayed once for each task, and never with a user that a model plays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from environments.contract import Action, Message, Observation, Score, Target, TargetTask, ToolCall
from environments.synthesized import references
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec, DenseEnvironment
from environments.synthesized.references import References
from environments.targets import catalogue, tau2
from environments.targets.catalogue import load_target
from environments.targets.shop.target import target as shop
from errors import ProviderError
from models.episodes import Episode, Player, play_all
from models.policy import Sampling
from models.scripted import NoopPolicy

USER = "litellm:openai/gpt-4.1"


class Asked:
    """A target whose user is asked at every reset; `problems` are what the user raises, one after another."""

    name, licence, data_hash = "asked", "none", "asked-1"

    def __init__(self, user: str = USER, problems: Sequence[Exception | None] = ()) -> None:
        self.user, self.problems = user, list(problems)
        self.resets: list[str] = []
        self.open = 0
        self.gate = threading.Event()
        self.gate.set()

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return [TargetTask(f"t{n}", split, "asked", n) for n in range(3)]

    def environment(self) -> AskedEpisode:
        self.open += 1
        return AskedEpisode(self)


class AskedEpisode:
    """Solved by one call; the user has to be asked first."""

    tools, instructions, max_steps = (), "", 3
    examples: Sequence[Message] = ()

    def __init__(self, target: Asked) -> None:
        self.target = target

    def reset(self, task: TargetTask) -> Observation:
        self.task, self.called = task, False
        self.target.resets.append(task.id)
        self.target.gate.wait(10)
        if self.target.problems and (problem := self.target.problems.pop(0)):
            raise problem
        return Observation((Message("user", "Hi."),))

    def step(self, action: Action) -> Observation:
        self.called |= bool(action.tool_calls)
        return Observation((), done=True)

    def score(self) -> Score:
        return Score(float(self.called), self.called)

    def oracle(self) -> Action | None:
        return None if self.called else Action(tool_calls=(ToolCall("solve", {"n": self.task.seed}),))

    def close(self) -> None:
        self.target.open -= 1


def test_a_reference_is_replayed_once_for_each_task_and_its_environment_closed() -> None:
    target = Asked()
    known = References(target)
    tasks = target.tasks("test")
    first = [known.calls(task) for task in (*tasks, *tasks)]
    assert first[:3] == first[3:] == [(ToolCall("solve", {"n": n}),) for n in range(3)]
    assert target.resets == ["t0", "t1", "t2"]
    assert target.open == 0
    other = TargetTask("t0", "test", "asked", 7, {"without": [0]})
    assert known.calls(other) == (ToolCall("solve", {"n": 7}),), "another payload is another task"


def test_those_who_come_while_it_is_replayed_wait_for_it() -> None:
    target = Asked()
    known, (task, *_) = References(target), target.tasks("test")
    target.gate.clear()
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(known.calls, task) for _ in range(4)]
        target.gate.set()
        assert {len(future.result(10)) for future in asking} == {1}
    assert target.resets == ["t0"]


def test_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "KEPT", 2)
    target = Asked()
    known, (one, two, three) = References(target), target.tasks("test")
    for task in (one, two, one, three, one, two):
        known.calls(task)
    assert target.resets == ["t0", "t1", "t2", "t1"]


def test_a_provider_that_fails_in_the_replay_costs_one_episode_and_is_asked_again() -> None:
    """The first reset is the episode's own, the second that of its reference, which is kept for the third."""
    target = Asked(problems=[None, ProviderError("the user's model timed out", transient=True)])
    known, task = References(target), target.tasks("test")[0]
    player = Player(lambda: DenseEnvironment(target.environment(), known), NoopPolicy(), None, Sampling())
    lost, *others = play_all(player, [Episode(str(n), task) for n in range(4)])
    assert (lost.boundary, lost.score) == ("provider", None)
    assert [t.score is not None for t in others] == [True, True, True]
    assert len(target.resets) == 4 + 2
    assert target.open == 0


def test_a_reference_needs_no_model_to_play_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = Asked("scripted")
    monkeypatch.setattr(catalogue, "builtin_names", lambda: ["asked"])
    monkeypatch.setattr(catalogue, "load_target", lambda name: {"asked": cheap}[name])
    paid = Asked()
    assert References(paid).calls(paid.tasks("test")[0])
    assert (paid.resets, cheap.resets) == ([], ["t0"])


def test_a_benchmarks_reference_asks_no_model() -> None:
    if missing := tau2.describe()[0].missing:
        pytest.skip(missing)
    asked: list[Any] = []

    def user(messages: Any, tools: Any) -> Any:
        asked.append(messages)
        return "###STOP###", ()

    target: Target = load_target("tau2:retail", USER, user)
    task = next(t for t in target.tasks("diagnosis") if t.capabilities)
    assert References(target).calls(task)
    assert asked == []


def test_an_environments_episodes_share_their_references() -> None:
    made: list[str] = []
    spec = CompositionSpec("shop", shop().data_hash, "refund_payment", ("refund_part",))
    composed = ComposedEnvironment(shop(), spec)
    inner = composed._references._replayed

    def replayed(task: TargetTask, key: str) -> tuple[ToolCall, ...]:
        made.append(task.id)
        return inner(task, key)

    composed._references._replayed = replayed  # type: ignore[method-assign]
    player = Player(composed.environment, NoopPolicy(), None, Sampling())
    tasks = [composed.scenario(seed) for seed in (0, 1, 0, 1, 0)]
    rewards = [t.score and t.score.reward for t in play_all(player, [Episode(f"{i}", t) for i, t in enumerate(tasks)])]
    assert rewards == [0.0] * 5
    assert made == [tasks[0].id, tasks[1].id]
