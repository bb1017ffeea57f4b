"""Composed environments: deterministic, the right share of retention, and a reward that teaches the right thing."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from environments.contract import Action, Environment, Message, Observation, Score, TargetTask, ToolCall
from environments.synthesized.composed import (
    NEAR_MISS,
    ComposedEnvironment,
    CompositionSpec,
    DenseEnvironment,
    call_credit,
)
from environments.synthesized.references import References
from environments.targets.shop.target import target
from environments.validation.checks import Limits, validate_environment
from errors import CallOverdue, ConfigurationError, EnvironmentFault
from models.scripted import RandomPolicy

SHOP = target()
SPEC = CompositionSpec(
    "shop", SHOP.data_hash, "refund_payment", ("refund_part", "refund_too_much"), ("cancel_pending", "item_price")
)
COMPOSED = ComposedEnvironment(SHOP, SPEC)


def made(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


REFUND = made("refund", order=512, amount=7)


@pytest.mark.parametrize(
    ("calls", "credit"),
    [
        ([REFUND], 1.0),
        ([], 0.0),
        ([made("cancel", order=512)], 0.0),
        ([made("refund", order=512, amount=9)], 1 / 3),
        ([made("refund", order=1, amount=9)], 0.0),
        ([made("refund", order=512)], 1 / 3),
        ([made("refund", order=512, amount=7, why="x")], 2 / 3),
        ([REFUND, made("cancel", order=512)], 2 / 3),
        ([made("refund", order=512, amount=9), REFUND], 2 / 3),
        ([REFUND, *[made("find", order=i) for i in range(9)]], 0.0),
    ],
)
def test_call_credit(calls: list[ToolCall], credit: float) -> None:
    assert call_credit([REFUND], calls) == pytest.approx(credit)


def test_call_credit_uses_a_call_once_and_wants_nothing_from_nothing() -> None:
    twice = [made("cancel", order=1), made("cancel", order=2)]
    assert call_credit(twice, twice[::-1]) == 1.0
    assert call_credit(twice, twice[:1]) == pytest.approx(0.5)
    assert call_credit([], [REFUND]) == 0.0


def test_another_home_draws_other_scenarios() -> None:
    """Without a seed an environment has the id that it had before there was one."""
    apart = replace(SPEC, seed=54)
    assert replace(SPEC, seed=0).id == SPEC.id != apart.id
    other = ComposedEnvironment(SHOP, apart)
    assert {COMPOSED.scenario(s).id for s in range(50)}.isdisjoint(other.scenario(s).id for s in range(50))


def test_scenarios_are_a_function_of_the_seed() -> None:
    again = ComposedEnvironment(target(), SPEC)
    assert [COMPOSED.scenario(s) for s in range(-20, 40)] == [again.scenario(s) for s in range(-20, 40)]
    other = ComposedEnvironment(SHOP, CompositionSpec(**{**SPEC.__dict__, "version": 2}))
    assert other.spec.id != SPEC.id
    assert [other.scenario(s).id for s in range(20)] != [COMPOSED.scenario(s).id for s in range(20)]
    assert len({COMPOSED.scenario(s).id for s in range(200)}) == 200


def test_a_third_of_the_scenarios_retains_and_own_ones_never_do() -> None:
    drawn = [COMPOSED.scenario(seed).family for seed in range(3000)]
    retained = sum(f in SPEC.retention_families for f in drawn) / len(drawn)
    assert retained == pytest.approx(1 / 3, abs=0.026)  # three standard errors
    assert set(drawn) == {*SPEC.families, *SPEC.retention_families}
    assert {COMPOSED.own_scenario(seed).family for seed in range(100)} == set(SPEC.families)


def test_no_training_scenario_is_in_a_split() -> None:
    known = {t.id for split in ("diagnosis", "validation", "test") for t in SHOP.tasks(split)}
    assert not known & {COMPOSED.scenario(seed).id for seed in range(300)}


def play(environment: Environment, seed: int, policy: RandomPolicy | None = None) -> Any:
    """Score of the reference solution, or of random actions."""
    observation = environment.reset(COMPOSED.scenario(seed))
    messages = list(observation.messages)
    rng = random.Random(seed)
    for _ in range(environment.max_steps):
        action = policy.act(environment, messages, rng.randrange(10**6)) if policy else environment.oracle()
        if observation.done or action is None:
            break
        observation = environment.step(action)
        messages += observation.messages
    score = environment.score()
    environment.close()
    return score


def test_only_success_earns_more_than_a_near_miss() -> None:
    for seed in range(40):
        assert play(COMPOSED.environment(), seed).reward == 1.0
    scores = [play(COMPOSED.environment(), seed, RandomPolicy()) for seed in range(1200)]
    for score in scores:
        assert score.reward == 1.0 if score.success else 0.0 <= score.reward < NEAR_MISS
    assert any(0.0 < s.reward < NEAR_MISS for s in scores)  # dense: groups can be told apart


def test_each_further_version_pays_half_as_much_for_near_misses() -> None:
    """It replaces one whose training learnt to come near instead of to succeed."""
    again = ComposedEnvironment(COMPOSED.target, replace(COMPOSED.spec, version=2))
    assert again.spec.id != COMPOSED.spec.id, "its scenarios are its own"
    scores = [play(again.environment(), seed, RandomPolicy()) for seed in range(1200)]
    assert 0.0 < max(s.reward for s in scores if not s.success) < NEAR_MISS / 2
    assert play(again.environment(), 0).reward == 1.0


def test_near_misses_are_ordered() -> None:
    task = next(COMPOSED.own_scenario(s) for s in range(50) if COMPOSED.own_scenario(s).family == "refund_part")
    right = next(s for s in task.payload["reference"] if "call" in s)["arguments"]

    def reward(*calls: ToolCall) -> float:
        environment = COMPOSED.environment()
        environment.reset(task)
        for one in calls:
            environment.step(Action(tool_calls=(one,)))
        environment.step(Action(content="Done."))
        return environment.score().reward

    almost = reward(made("refund", order=right["order"], amount=1 if right["amount"] != 1 else 2))
    assert reward() == reward(made("find", order=right["order"])) == 0.0
    assert 0.0 < almost < NEAR_MISS
    assert reward(made("refund", **right)) == 1.0


class _Gaps:
    """The shop, whose generator fails for a fifth of the seeds."""

    name, data_hash = SHOP.name, SHOP.data_hash

    def __init__(self, problem: type[Exception]) -> None:
        self.problem = problem

    def families(self) -> Any:
        return SHOP.families()

    def generate(self, family: str, seed: int) -> TargetTask:
        if seed % 5 == 0:
            raise self.problem(f"nothing for {seed}")
        return SHOP.generate(family, seed)


def test_a_generator_that_fails_for_some_seeds_gives_a_scenario_for_each_and_always_the_same() -> None:
    target: Any = _Gaps(KeyError)
    composed = ComposedEnvironment(target, SPEC)
    for draw, sound in ((composed.scenario, COMPOSED.scenario), (composed.own_scenario, COMPOSED.own_scenario)):
        tasks, others = [draw(seed) for seed in range(60)], [sound(seed) for seed in range(60)]
        assert tasks == [draw(seed) for seed in range(60)]
        same = [task == other for task, other in zip(tasks, others, strict=True)]
        assert 30 < sum(same) < 60
        assert [t.family for t in tasks] == [t.family for t in others]


def test_what_a_generator_cannot_help_is_raised_at_once() -> None:
    target: Any = _Gaps(CallOverdue)
    composed = ComposedEnvironment(target, SPEC)
    with pytest.raises(CallOverdue):
        [composed.scenario(seed) for seed in range(60)]


class _Answers:
    """A target whose answers are text: it alone knows how near one came."""

    tools, instructions, examples, max_steps = (), "", (), 1

    def reset(self, task: TargetTask) -> Observation:
        self.said = ""
        return Observation((Message("user", "How many?"),))

    def step(self, action: Action) -> Observation:
        self.said = action.content
        return Observation((), done=True)

    def score(self) -> Score:
        return Score({"12": 1.0, "13": 0.4}.get(self.said, 0.0), self.said == "12")

    def oracle(self) -> Action | None:
        return None if self.said else Action(content="12")

    def close(self) -> None:
        return None


class _Answering:
    """The target of those answers, as far as a reference needs it."""

    name, environment = "answers", _Answers


@pytest.mark.parametrize(("text", "reward"), [("12", 1.0), ("13", 0.4 * NEAR_MISS), ("x", 0.0)])
def test_a_near_miss_of_an_answer_in_text_is_the_targets_own(text: str, reward: float) -> None:
    environment = DenseEnvironment(_Answers(), References(_Answering()))  # type: ignore[arg-type]
    environment.reset(TargetTask("a", "generated", "", 0))
    environment.step(Action(content=text))
    assert environment.score().reward == pytest.approx(reward)


@pytest.mark.parametrize("score", [Score(float("nan"), False), Score(float("nan"), True), Score(-1.0, False), 0.5])
def test_a_score_that_is_none_is_not_made_one(score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is played without the denser reward it is the environment's fault."""
    monkeypatch.setattr(_Answers, "score", lambda self: score)
    environment = DenseEnvironment(_Answers(), References(_Answering()))  # type: ignore[arg-type]
    environment.reset(TargetTask("a", "generated", "", 0))
    environment.step(Action(content="13"))
    with pytest.raises(EnvironmentFault, match=r"score\(\)"):
        environment.score()


def test_validation_and_red_team_accept_it() -> None:
    limits = Limits(distinct=60, searched=120, episodes=40, attack_seeds=2, replayed=5)
    verdict = validate_environment(COMPOSED.environment, COMPOSED.scenario, limits)
    assert verdict.accepted, verdict.reasons


def test_what_cannot_be_composed() -> None:
    empty = CompositionSpec("shop", SHOP.data_hash, "fly", ())
    with pytest.raises(ConfigurationError, match="'fly'"):
        ComposedEnvironment(SHOP, empty)

    class Bare:
        name, data_hash, licence = "bare", "0", "none"
        tasks = environment = SHOP.environment

    with pytest.raises(ConfigurationError, match="no generators"):
        ComposedEnvironment(Bare(), SPEC)  # type: ignore[arg-type]
