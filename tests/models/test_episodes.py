"""Environments that fail, lie or never end: their own episode is an error, the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from environments.contract import DEEPEST, Action, Check, Message, Observation, Score, TargetTask, Termination, ToolCall
from environments.targets.shop.target import target
from environments.wrapping import WrappedEnvironment
from errors import ContextOverflow, PolicyError, ProviderError, SandboxError, TargetError
from models.episodes import Episode, Player, Trajectory, play_all, trajectory_id
from models.policy import PolicyIdentity, Sampling
from models.scripted import NoopPolicy, OraclePolicy, RandomPolicy

Change = Callable[["Plain"], None]


class Plain:
    """An environment that ends after two turns; `changes` by task id make it misbehave."""

    tools: Sequence[Any] = ()
    instructions = "Answer."
    examples: Sequence[Message] = ()
    max_steps = 4

    def __init__(self, changes: dict[str, Change]) -> None:
        self.changes, self.turns, self.closed = changes, 0, False

    def reset(self, task: TargetTask) -> Observation:
        self.changes.get(task.id, lambda _: None)(self)
        return self.on_reset()

    def on_reset(self) -> Any:
        return Observation((Message("user", "hello"),))

    def step(self, action: Action) -> Any:
        self.turns += 1
        return Observation((Message("user", "and?"),), done=self.turns == 2)

    def score(self) -> Any:
        return Score(0.5, False)

    def oracle(self) -> Action | None:
        return Action(content="Hello.")

    def close(self) -> None:
        self.closed = True


def boom(*_: Any) -> Any:
    raise KeyError("boom")


def giving(name: str, value: Any) -> Change:
    return lambda environment: setattr(environment, name, lambda *_: value)


def raising(name: str, problem: Callable[..., Any] = boom) -> Change:
    return lambda environment: setattr(environment, name, problem)


def scored(metrics: Any = None, success: Any = False, checks: Any = (), **check: Any) -> Change:
    """A score that is sound but for what is given; `check` are fields of its one check."""
    if check:
        checks = (Check(**({"name": "n", "kind": "k", "required": True, "passed": True} | check)),)
    return giving("score", Score(0.5, success, checks, {} if metrics is None else metrics))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def sandbox_died(*_: Any) -> Any:
    raise SandboxError("the sandbox died; start it again")


def leaves(*_: Any) -> Any:
    raise SystemExit(3)


def played(change: Change, step_seconds: float = 30.0, policy: Any = None) -> tuple[Trajectory, list[Trajectory]]:
    """The trajectory of the changed episode, and those of the two sound ones around it."""
    tasks = [TargetTask(name, "test", "plain", 0) for name in ("before", "changed", "after")]
    player = Player(
        lambda: Plain({"changed": change}), policy or NoopPolicy(), None, Sampling(), step_seconds=step_seconds
    )
    first, changed, last = play_all(player, [Episode(t.id, t) for t in tasks])
    return changed, [first, last]


FAULTS = {
    "reset raises": (raising("on_reset"), "reset raised KeyError"),
    "step raises": (raising("step"), "step raised KeyError"),
    "step leaves the process": (raising("step", leaves), "step raised SystemExit"),
    "score raises": (raising("score"), "score raised KeyError"),
    "reset gives an end": (giving("on_reset", Observation((Message("user", "x"),), True)), "an episode that is over"),
    "reset gives an end without a word": (giving("on_reset", Observation((), done=True)), "an episode that is over"),
    "reset gives nothing": (giving("on_reset", None), "NoneType"),
    "step gives a text": (giving("step", "done"), "returned str"),
    "step gives no messages": (giving("step", Observation(({"role": "user"},))), "contract.Message"),  # type: ignore[arg-type]
    "step gives bytes": (giving("step", Observation((Message("user", b"x"),))), "contract.Message"),  # type: ignore[arg-type]
    "step gives an unknown role": (giving("step", Observation((Message("human", "x"),))), "role 'human'; give one of"),  # type: ignore[arg-type]
    "step gives half a character": (giving("step", Observation((Message("user", "\ud800"),))), "not Unicode"),
    "score gives a number": (giving("score", 1.0), "returned float"),
    "reward is NaN": (giving("score", Score(float("nan"), True)), "nan"),
    "reward is 2": (giving("score", Score(2.0, True)), "reward 2.0"),
    "reward is negative": (giving("score", Score(-0.1, False)), "-0.1"),
    "reward is a text": (giving("score", Score("1", True)), "a reward is a number"),  # type: ignore[arg-type]
    "step gives nothing to answer": (giving("step", Observation(())), "no message and is not done"),
    "step gives a call with a set": (
        giving("step", Observation((Message("assistant", "", (ToolCall("f", {"a": {1}}),)),))),
        "no JSON",
    ),
    "step gives no list": (giving("step", Observation(None)), "its messages as a NoneType"),  # type: ignore[arg-type]
    "reset gives a generator": (giving("on_reset", Observation(m for m in [Message("user", "x")])), "as a generator"),  # type: ignore[arg-type]
    "step gives a deep call": (
        giving("step", Observation((Message("assistant", "", (ToolCall("f", {"a": nested(500)}),)),))),
        "nested deeper",
    ),
    "success is a number": (scored(success=1), "success 1; success is True or False"),
    "success is missing": (scored(success=None), "success None"),
    "a metric is NaN": (scored({"ratio": float("nan")}), "metric 'ratio' as nan"),
    "a metric is infinite": (scored({"ratio": float("-inf")}), "metrics are finite"),
    "a metric is too large to print": (scored({"ratio": 10**5000}), "raised ValueError"),
    "a metric is a text": (scored({"ratio": "1"}), "metrics are finite"),
    "metrics are a list": (scored([1.0]), "a dict of numbers"),
    "checks are missing": (giving("score", Score(0.5, False, None)), "a tuple of contract.Check"),  # type: ignore[arg-type]
    "a check is a text": (scored(checks=("n",)), "'n' as a check"),
    "a check's kind is missing": (scored(kind=None), "kind None; it is a text"),
    "a check's detail is a number": (scored(detail=5), "detail 5; it is a text"),
    "a check is passed in part": (scored(passed=0.5), "passed 0.5; it is True or False"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_environment_costs_its_own_episode(name: str) -> None:
    change, words = FAULTS[name]
    changed, others = played(change)
    assert changed.score is None  # an error is never a reward of 0
    assert changed.termination is Termination.ERROR
    assert changed.boundary == "environment"
    assert words in changed.error
    assert all(t.score is not None and t.termination is Termination.DONE for t in others)


def test_boundary_is_the_errors_own() -> None:
    changed, others = played(raising("step", sandbox_died))
    assert (changed.boundary, changed.score) == ("sandbox", None)
    assert all(t.score for t in others)


@pytest.mark.parametrize("problem", [ProviderError("the user's model timed out", transient=True), TargetError("gone")])
def test_what_scoring_asks_of_others_may_fail_for_its_own_episode(problem: Exception) -> None:
    def ask(*_: Any) -> Any:
        raise problem

    changed, others = played(raising("score", ask))
    assert (changed.boundary, changed.score, changed.error) == (problem.boundary, None, str(problem))  # type: ignore[attr-defined]
    assert changed.termination is Termination.ERROR
    assert all(t.score for t in others)


def test_numbers_of_numpy_are_as_good_as_pythons() -> None:
    given = Check("n", "k", np.bool_(True), np.bool_(False))  # type: ignore[arg-type]
    score = Score(np.float32(0.5), np.bool_(True), (given,), {"n": np.int64(3), "x": np.float32(0.25)})  # type: ignore[arg-type]
    changed, _ = played(giving("score", score))
    assert changed.score == Score(0.5, True, (Check("n", "k", True, False),), {"n": 3, "x": 0.25})
    assert type(changed.score.success) is bool
    assert {type(value) for value in changed.score.metrics.values()} == {int, float}


@pytest.mark.parametrize(("depth", "kept"), [(DEEPEST - 1, True), (DEEPEST, False), (500, False), (100_000, False)])
def test_calls_nested_too_deeply_are_malformed_whoever_made_them(depth: int, kept: bool) -> None:
    class Deep(NoopPolicy):
        def act(self, *_: Any) -> Action:
            return Action("Now.", (ToolCall("f", {"a": nested(depth)}),))

    trajectory, _ = played(lambda _: None, policy=Deep())
    assert trajectory.score is not None
    taken = trajectory.steps[0].action
    assert (bool(taken.tool_calls), bool(taken.malformed)) == (kept, not kept)
    assert kept or "f: arguments nested deeper than 64" in trajectory.messages[1].content
    for message in trajectory.messages:
        message.as_dict()


def schema(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


OFFERS: dict[str, tuple[str, Any, str]] = {
    "no tools": ("tools", None, "tools are None"),
    "a tool without a function": ("tools", [{"name": "f", "input_schema": {}}], "OpenAI function schemas"),
    "a tool with a list of properties": ("tools", [schema(properties=["a"])], "['a']; give a dict of schemas"),
    "a tool with a set": ("tools", [schema(properties={"a": {"enum": {1, 2}}})], "no JSON"),
    "no instructions": ("instructions", None, "instructions are None"),
    "half a character": ("instructions", "a\ud800", "not Unicode"),
    "examples that are dicts": ("examples", [{"role": "user", "content": "x"}], "contract.Message"),
    "no limit of steps": ("max_steps", None, "max_steps is None"),
    "no step": ("max_steps", 0, "max_steps is 0; give a whole number from 1 to 10000"),
    "steps without end": ("max_steps", 10**9, "max_steps is 1000000000; give a whole number"),
}


@pytest.mark.parametrize("name", OFFERS)
def test_an_environment_that_offers_nonsense_costs_its_own_episode(name: str, tiny_model: Any) -> None:
    attribute, value, words = OFFERS[name]
    changes: dict[str, Change] = {"changed": lambda environment: setattr(environment, attribute, value)}
    tasks = [TargetTask(key, "test", "plain", 0) for key in ("before", "changed", "after")]
    player = Player(lambda: Plain(changes), *tiny_model, Sampling(1.0, 6))
    before, changed, after = play_all(player, [Episode(t.id, t) for t in tasks])
    assert (changed.boundary, changed.score) == ("environment", None)
    assert words in changed.error
    assert [t.termination for t in (before, after)] == [Termination.DONE] * 2


def test_tools_that_turn_to_nonsense_in_a_later_turn_cost_their_own_episode(tiny_model: Any) -> None:
    class Growing(Plain):
        def step(self, action: Action) -> Any:
            self.tools = (*self.tools, {"name": "f"})
            return super().step(action)

    task = TargetTask("t", "test", "plain", 0)
    (trajectory,) = play_all(Player(lambda: Growing({}), *tiny_model, Sampling(1.0, 6)), [Episode("t", task)])
    assert (trajectory.boundary, trajectory.score) == ("environment", None)


def test_an_oracle_that_gives_no_action_costs_its_own_episode() -> None:
    changed, others = played(giving("oracle", "Hello."), policy=OraclePolicy())
    assert (changed.boundary, changed.score) == ("environment", None)
    assert all(t.score for t in others)


@pytest.mark.parametrize(
    ("make", "said"), [(boom, "make raised KeyError"), (lambda: None, "gave NoneType, which is no environment")]
)
def test_an_environment_that_cannot_be_made(make: Any, said: str) -> None:
    task = TargetTask("t", "test", "plain", 0)
    (trajectory,) = play_all(Player(make, NoopPolicy(), None, Sampling()), [Episode("t", task)])
    assert (trajectory.boundary, trajectory.score) == ("environment", None)
    assert said in trajectory.error


def test_an_oracle_that_raises_and_a_close_that_raises() -> None:
    changed, others = played(raising("oracle"), policy=OraclePolicy())
    assert (changed.boundary, changed.score) == ("environment", None)
    assert all(t.score for t in others)
    changed, _ = played(raising("close"))
    assert changed.score is not None  # it was scored before it was let go


def test_an_endless_episode_is_stopped_and_scored() -> None:
    changed, _ = played(giving("step", Observation((Message("user", "and?"),))))
    assert changed.termination is Termination.MAX_STEPS
    assert len(changed.steps) == Plain.max_steps
    assert changed.score == Score(0.5, False)


def blocking(*_: Any) -> Any:
    threading.Event().wait(60)


def stubborn(*_: Any) -> Any:
    while True:
        try:
            while True:
                time.sleep(0.01)
        except Exception:  # a limit that such a handler catches would be none
            continue


def computing(*_: Any) -> Any:
    while True:
        pass


@pytest.mark.parametrize("problem", [blocking, stubborn, computing])
@pytest.mark.parametrize("name", ["on_reset", "step", "score"])
def test_a_call_that_never_returns_is_ended(problem: Callable[..., Any], name: str) -> None:
    began = time.perf_counter()
    changed, others = played(raising(name, problem), step_seconds=0.2)
    assert time.perf_counter() - began < 10
    assert (changed.boundary, changed.score) == ("environment", None)
    assert "0.2 s" in changed.error
    assert all(t.score for t in others)


def test_environments_are_closed_whatever_happens() -> None:
    made: list[Plain] = []

    def make() -> Plain:
        made.append(Plain({"bad": raising("step"), "worse": raising("on_reset")}))
        return made[-1]

    tasks = [TargetTask(name, "test", "plain", 0) for name in ("good", "bad", "worse")]
    play_all(Player(make, NoopPolicy(), None, Sampling()), [Episode(t.id, t) for t in tasks])
    assert [e.closed for e in made] == [True, True, True]


def test_token_episodes_keep_ids_and_go_on_beside_faulty_ones(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    changes = {f"{i}": change for i, (change, _) in enumerate(FAULTS.values())}
    tasks = [TargetTask(f"{i}", "test", "plain", 0) for i in range(2 * len(changes))]
    player = Player(lambda: Plain(changes), policy, renderer, Sampling(1.0, 6), window=5)
    trajectories = play_all(player, [Episode(t.id, t, seed=1) for t in tasks])
    for trajectory in trajectories[: len(changes)]:
        assert (trajectory.score, trajectory.boundary) == (None, "environment")
    for trajectory in trajectories[len(changes) :]:
        assert trajectory.termination is Termination.DONE
        talk = trajectory.conversation
        assert sum(talk.sampled) == sum(s.sampled_tokens for s in trajectory.steps)
    assert player.environment_seconds > 0
    assert policy.poll() == []


def test_an_environment_that_is_given_twice_costs_the_second_episode_and_not_the_first(tiny_model: Any) -> None:
    """Open beside one another, two episodes would act and be scored in one."""
    policy, renderer = tiny_model
    shared = Plain({})

    class Wrapped(WrappedEnvironment):
        """As those that training puts around a target's."""

    tasks = [TargetTask(f"{i}", "test", "plain", 0) for i in range(3)]
    episodes = [Episode(t.id, t, seed=1) for t in tasks]
    for make in (lambda: shared, lambda: Wrapped(shared)):
        beside = play_all(Player(make, policy, renderer, Sampling(1.0, 6), window=3), episodes)
        assert sorted(trajectory.boundary for trajectory in beside) == ["", "environment", "environment"]
        assert all("gave the Plain in which another episode is being played" in t.error for t in beside if t.error)
        shared.turns = 0
    one_by_one = play_all(Player(lambda: shared, policy, renderer, Sampling(1.0, 6), window=1), episodes)
    assert [trajectory.error for trajectory in one_by_one] == ["", "", ""]


def test_trajectories_do_not_depend_on_their_company(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    tasks = [TargetTask(f"{i}", "test", "plain", 0) for i in range(9)]
    episodes = [Episode(t.id, t, seed=3) for t in tasks]
    together = play_all(Player(lambda: Plain({}), policy, renderer, Sampling(1.0, 8), 16), episodes)
    for expected in together[::4]:
        (alone,) = play_all(Player(lambda: Plain({}), policy, renderer, Sampling(1.0, 8), 1), [expected.episode])
        assert alone.conversation.ids == expected.conversation.ids
        assert alone.conversation.logprobs == pytest.approx(expected.conversation.logprobs, abs=1e-4)


def test_an_opening_longer_than_the_context_is_a_policy_error(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    task = TargetTask("changed", "test", "plain", 0)
    long = giving("on_reset", Observation((Message("user", "order " * 2000),)))
    (trajectory,) = play_all(
        Player(lambda: Plain({"changed": long}), policy, renderer, Sampling(1.0, 8)), [Episode("k", task)]
    )
    assert (trajectory.score, trajectory.boundary) == (None, ContextOverflow.boundary)


def test_an_agent_that_fills_its_context_is_scored(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    task = TargetTask("changed", "test", "plain", 0)
    more = giving("step", Observation((Message("user", "order 512 " * 150),)))
    (trajectory,) = play_all(
        Player(lambda: Plain({"changed": more}), policy, renderer, Sampling(1.0, 8)), [Episode("k", task)]
    )
    assert trajectory.termination is Termination.CONTEXT
    assert trajectory.score is not None


def test_a_token_policy_needs_a_renderer(tiny_model: Any) -> None:
    with pytest.raises(PolicyError, match="renderer"):
        play_all(Player(lambda: Plain({}), tiny_model[0], None, Sampling()), [])


def test_scripted_policies_on_the_shop_and_ids() -> None:
    shop = target()
    task = shop.tasks("test")[0]
    rates = []
    for policy in (OraclePolicy(), NoopPolicy(), RandomPolicy()):
        (trajectory,) = play_all(Player(shop.environment, policy, None, Sampling()), [Episode("k", task)])
        assert trajectory.score is not None
        rates.append(trajectory.score.success)
    assert rates[0] is True
    one = PolicyIdentity("base", "1")
    ids = {
        trajectory_id(data, where, task, seed, trial, who)
        for data in ("a", "b")
        for where in ("shop", "x")
        for seed in (0, 1)
        for trial in (0, 1)
        for who in (one, PolicyIdentity("base", "1", adapter="digest"))
    }
    assert len(ids) == 32
