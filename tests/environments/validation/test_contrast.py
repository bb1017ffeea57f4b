"""Capabilities that have one right answer: what always does the same is judged where that answer is wrong."""

import random

import pytest

from environments.contract import Action, Check, Message, Observation, Score, TargetTask
from environments.validation.checks import Limits, ValidationVerdict, validate_environment
from environments.validation.contrast import Contrast, one_answer

LIMITS = Limits(distinct=40, searched=60, episodes=40, attack_seeds=3, replayed=4)


def scenario(seed: int, beside: float = 0.5) -> TargetTask:
    """Whether a shop sells something; `beside` is the share of things that it does sell."""
    rng = random.Random(seed)
    family = "sold" if rng.random() < beside else "unknown"
    return TargetTask(f"thing-{seed}", "generated", family, seed, {"price": rng.randint(10, 10**6)})


def sold(task: TargetTask) -> bool:
    return task.family == "sold"


class Selling:
    """The right answer is the price of what is sold, and `none` for everything else."""

    tools, instructions, examples, max_steps = (), "Name the price, or none.", (), 1

    def reset(self, task: TargetTask) -> Observation:
        self.task, self.said = task, ""
        asked = f"It says {task.payload['price']}." if sold(task) else f"Thing {task.payload['price']} is unknown."
        return Observation((Message("user", asked),))

    def step(self, action: Action) -> Observation:
        self.said = self.said or action.content
        return Observation((), True)

    def wanted(self) -> str:
        return str(self.task.payload["price"]) if sold(self.task) else "none"

    def score(self) -> Score:
        right = self.said == self.wanted()
        return Score(float(right), right, (Check("answer", "answer", True, right),))

    def oracle(self) -> Action | None:
        return None if self.said else Action(content=self.wanted())

    def close(self) -> None:
        return None


class Careless(Selling):
    """Takes `none` for an answer to everything."""

    def score(self) -> Score:
        right = self.said in (self.wanted(), "none")
        return Score(float(right), right, (Check("answer", "answer", True, right),))


def judged(
    environment: type = Selling, beside: float = 0.5, told: bool = True, many: bool = False
) -> ValidationVerdict:
    contrast = Contrast(sold, many) if told else None
    return validate_environment(environment, lambda seed: scenario(seed, beside), LIMITS, contrast=contrast)


def test_one_answer_is_told_from_many() -> None:
    declined = [scenario(seed, beside=0.0) for seed in range(21)]
    assert one_answer(Selling(), declined)
    assert not one_answer(Selling(), [scenario(seed, beside=1.0) for seed in range(21)])
    assert not one_answer(Selling(), [*declined[:18], *(scenario(seed, beside=1.0) for seed in range(3))])
    assert not one_answer(Selling(), declined[:1])


def test_half_of_the_scenarios_asking_for_another_answer_is_enough() -> None:
    verdict = judged()
    assert verdict.accepted, verdict.reasons
    beside = verdict.figures["contrast"]
    assert 12 <= beside["scenarios"] <= 28
    assert beside["of"] == 40
    policies = verdict.figures["policies"]
    assert policies["constant_replay"]["episodes"] == policies["null"]["episodes"] == beside["scenarios"]
    assert policies["oracle"]["episodes"] == 40


def test_without_being_told_the_constant_wins() -> None:
    verdict = judged(told=False, beside=0.34)
    assert not verdict.accepted
    assert any(reason.startswith("constant_replay: success 0.") for reason in verdict.reasons)
    assert "contrast" not in verdict.figures


def test_an_environment_that_takes_the_constant_everywhere_is_refused() -> None:
    verdict = judged(Careless)
    assert not verdict.accepted
    assert any(reason.startswith("constant_replay: success 1 ") for reason in verdict.reasons)


@pytest.mark.parametrize(("beside", "found"), [(0.1, "at least 30%"), (0.0, "contrast: in 0 of 40"), (1.0, "40 of 40")])
def test_too_few_scenarios_of_either_kind_are_refused(beside: float, found: str) -> None:
    verdict = judged(beside=beside)
    assert not verdict.accepted
    assert any(reason.startswith("contrast:") and found in reason for reason in verdict.reasons)


def test_among_many_families_a_sample_may_have_none_with_one_answer() -> None:
    verdict = judged(beside=1.0, many=True)
    assert verdict.accepted, verdict.reasons
    assert verdict.figures["contrast"] == {"scenarios": 40, "of": 40}
    assert not judged(beside=0.0, many=True).accepted, "there have to be some for contrast"
