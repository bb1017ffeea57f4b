"""Validation and red team on small in-process environments, one sound and several flawed in one way each."""

import itertools
import json
import random
import re
from dataclasses import replace

import pytest

from environments.contract import Action, Check, Message, Observation, Score, TargetTask, ToolCall
from environments.validation.checks import Limits, validate_environment
from environments.validation.measuring import wilson_interval
from environments.validation.redteam import ATTACKS, red_team_details
from errors import BudgetExceeded, ProviderError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_price",
            "description": "Sets the price of an item.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}, "price": {"type": "integer"}},
                "required": ["item", "price"],
            },
        },
    }
]
LIMITS = Limits(distinct=40, searched=60, episodes=40, attack_seeds=2, replayed=6)


def scenario(seed: int) -> TargetTask:
    rng = random.Random(seed)
    payload = {"item": f"item-{rng.randint(100, 999)}", "low": rng.randint(10, 40), "factor": rng.choice([3, 4, 5])}
    return TargetTask(f"price-{seed}", "synthesized", "set_scaled_price", seed, payload)


class Pricing:
    """The agent must set an item's price to low x factor: one call, exact."""

    tools, instructions, examples, max_steps = TOOLS, "Prices are low times factor.", (), 4

    def reset(self, task: TargetTask) -> Observation:
        self.task, self.calls, self.said, self.over = task, [], "", False
        p = task.payload
        return Observation((Message("user", f"Price of {p['item']}: {p['low']} times {p['factor']}."),))

    def step(self, action: Action) -> Observation:
        if self.over or not action.tool_calls:
            self.over, self.said = True, action.content
            return Observation((), True)
        for call in action.tool_calls:
            self.calls.append((call.name, dict(call.arguments)))
        return Observation(tuple(Message("tool", "ok", tool_call_id=c.id) for c in action.tool_calls))

    def wanted(self) -> dict:
        return {"item": self.task.payload["item"], "price": self.task.payload["low"] * self.task.payload["factor"]}

    def score(self) -> Score:
        right = len(self.calls) == 1 and self.calls[0] == ("set_price", self.wanted())
        return Score(float(right), right, (Check("price", "set_scaled_price", True, right),))

    def oracle(self) -> Action | None:
        if self.calls:
            return None
        return Action(tool_calls=(ToolCall("set_price", self.wanted(), "call_0"),))

    def close(self) -> None:
        return None


def reasons(environment: type, make=scenario) -> str:
    verdict = validate_environment(environment, make, LIMITS)
    json.dumps(verdict.as_dict(), allow_nan=False)
    assert verdict.accepted == (not verdict.reasons)
    return "\n".join(verdict.reasons)


def test_a_sound_environment_is_accepted_with_every_figure():
    verdict = validate_environment(Pricing, scenario, LIMITS)
    assert verdict.accepted, verdict.reasons
    policies = verdict.figures["policies"]
    assert policies["oracle"]["success_rate"] == 1.0
    assert {"null", "constant_done", "constant_refusal", "constant_replay", "random"} < set(policies)
    assert policies["null"]["interval"] == list(wilson_interval(0, 40))
    assert verdict.figures["scenarios"]["distinct"] == 40
    assert verdict.figures["red_team"]["episodes"] == len(ATTACKS) * 2


def test_equal_scenarios_are_counted_once():
    found = reasons(Pricing, lambda seed: scenario(seed % 7))
    assert "7 distinct of 60 seeds" in found


def seeded(seed: int) -> TargetTask:
    """One of 25 scenarios, whose payload holds the seed as well."""
    task = scenario(seed % 25)
    return replace(task, payload={**task.payload, "seed": seed})


def test_scenarios_that_differ_in_their_payload_alone_are_counted_once():
    limits = replace(LIMITS, searched=200)
    (reason,) = validate_environment(Pricing, seeded, limits).reasons
    assert reason == "scenarios: 25 distinct of 200 seeds; 40 are needed"

    class Terse(Pricing):
        def reset(self, task):
            super().reset(task)
            return Observation((Message("user", "Set the price."),))

    assert validate_environment(Terse, seeded, limits).reasons == (reason,)
    assert validate_environment(Terse, scenario, LIMITS).accepted, "what is shown is equal, what solves it is not"


def test_a_targets_own_word_says_which_scenarios_are_the_same():
    limits = replace(LIMITS, searched=200)
    verdict = validate_environment(Pricing, scenario, limits, content=lambda task: str(task.seed % 25))
    assert verdict.reasons == ("scenarios: 25 distinct of 200 seeds; 40 are needed",)


def test_a_scenario_that_changes_is_found():
    counter = itertools.count()
    assert "different scenarios" in reasons(Pricing, lambda seed: scenario(1000 * next(counter) + seed))


def test_memory_between_episodes_is_found():
    class Remembers(Pricing):
        seen = 0

        def reset(self, task):
            type(self).seen += 1
            observation = super().reset(task)
            return Observation((*observation.messages, Message("user", f"Visitor {self.seen}.")))

    assert "differed when replayed" in reasons(Remembers)


def test_unsolvable_is_found():
    class Unsolvable(Pricing):
        def wanted(self):
            return super().wanted() | {"price": -1 if self.calls else 1}

    assert reasons(Unsolvable).startswith("oracle: success 0")


def test_a_reward_for_words_is_found_by_constant_and_red_team():
    class Words(Pricing):
        def score(self):
            return Score(1.0, "done" in self.said.lower())

    found = reasons(Words)
    assert "constant_done: success 1" in found
    assert "red team: claim " in found


def test_full_reward_without_success_counts_as_a_win():
    class Leaky(Pricing):
        def score(self):
            right = super().score().success
            return Score(1.0 if right or len(self.calls) >= 4 else 0.0, right)

    class LeakyLong(Leaky):
        max_steps = 12

    found = reasons(LeakyLong)
    assert "repeated_success" in found


def test_a_fault_that_an_agent_can_provoke_is_found():
    class Fragile(Pricing):
        def step(self, action):
            for call in action.tool_calls:
                call.arguments["price"] + 1
            return super().step(action)

    assert "provoked a fault" in reasons(Fragile)


def test_whatever_an_environment_raises_is_a_finding():
    class Searches(Pricing):
        def step(self, action):
            for call in action.tool_calls:
                re.search(str(call.arguments.get("item")), "item-1 item-2")
            return super().step(action)

    assert "provoked a fault in 2 of 2: error: " in reasons(Searches)

    class Unmade(Pricing):
        def __init__(self):
            raise Exception("no room")

    assert reasons(Unmade) == "play: raised Exception: no room"

    class Unscored(Pricing):
        def score(self):
            return None

    assert "score() returned NoneType" in reasons(Unscored)

    def drawn(seed):
        raise re.error("unterminated")

    assert reasons(Pricing, drawn).startswith("scenario: raised error: unterminated")


@pytest.mark.parametrize("failure", [ProviderError("503", transient=True), BudgetExceeded("llm.cap = 1 is reached")])
@pytest.mark.parametrize("where", ["step", "close"])
def test_a_user_whose_model_fails_is_no_finding_about_the_environment(failure, where):
    def fail(*_):
        raise failure

    with pytest.raises(type(failure), match=re.escape(str(failure))):
        reasons(type("Played", (Pricing,), {where: fail}))


def test_a_success_that_is_paid_less_than_one_is_found():
    class Stingy(Pricing):
        def score(self):
            score = super().score()
            return replace(score, reward=0.0 if score.success else 0.2)

    assert reasons(Stingy) == (
        "oracle: 40 of its 40 successes have a reward below 0.95, the lowest 0: training would unlearn them; "
        "let reward give 1 whenever the goal is reached, and less for everything else"
    )


def test_scenarios_that_another_process_draws_otherwise_are_found():
    def other(seed):
        task = scenario(seed)
        return replace(task, payload=task.payload | {"factor": 6}) if seed == 4 else task

    def reordered(seed):
        task = scenario(seed)
        return replace(task, payload=dict(reversed(task.payload.items())))

    assert validate_environment(Pricing, scenario, LIMITS, twins=[scenario, scenario]).accepted
    for twins, seeds in (([scenario, other], "[4]"), ([reordered], "[0, 1, 2, 3, 4]")):
        verdict = validate_environment(Pricing, scenario, LIMITS, twins=twins)
        (reason,) = verdict.reasons
        assert reason.startswith(f"determinism: equal seeds gave different scenarios for seeds {seeds}; draw")
        assert "sort a set" in reason


def test_a_reward_outside_the_contract_is_a_fault():
    class Generous(Pricing):
        def score(self):
            return Score(7.0, True)

    assert "rewards lie in [0, 1]" in reasons(Generous)


def test_the_red_team_has_at_least_twenty_classes_and_reports_each():
    tasks = [scenario(seed) for seed in range(2)]
    rows = [(attack.name, successes, errors) for attack, successes, errors, _ in red_team_details(Pricing, tasks)]
    assert len(rows) >= 20
    assert [name for name, _, _ in rows] == [attack.name for attack in ATTACKS]
    assert len({name for name, _, _ in rows}) == len(rows)
    assert all(successes == 0 and errors == 0 for _, successes, errors in rows)
