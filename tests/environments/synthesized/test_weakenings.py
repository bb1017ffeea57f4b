"""Weakened modules are refused with the reason, sound ones are accepted, by the same settings."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from environments.contract import Message, ToolCall
from environments.sandbox.allowance import TimeLimit
from environments.synthesized.module_files import validate_module, verdict_lines
from environments.synthesized.modules import SandboxedModule
from environments.validation.need import Materials, Need, NeedLimits, check_need
from tests.environments.synthesized.weakenings import (
    ADDRESS,
    ASK,
    CHECK,
    MATERIALS,
    NEWEST,
    REFUND,
    WEAKENINGS,
)

_LOOK = """def _look(state):
    return {"name": "get_order", "arguments": {"order_id": next(iter(state["orders"]))}}


"""
_WANTED = """    wanted = [_look(state), *(c for c in scenario["goal"]["calls"] if c != _look(state))]
"""


@pytest.mark.parametrize("name", WEAKENINGS)
def test_a_weakened_module_is_refused_with_the_reason(name):
    verdict = validate_module(WEAKENINGS[name].source, materials=MATERIALS)
    assert not verdict.accepted
    assert WEAKENINGS[name].reason in "\n".join(verdict.reasons)


def test_there_are_four_of_each_way_to_weaken():
    styles = Counter(name.partition("_")[0] for name in WEAKENINGS)
    assert {style: styles[style] for style in ("volunteered", "retries", "reward")} == {
        "volunteered": 4,
        "retries": 4,
        "reward": 4,
    }


@pytest.mark.parametrize("path", [ASK, CHECK, REFUND, NEWEST, ADDRESS], ids=lambda path: path.stem)
def test_the_sound_modules_are_accepted_by_the_same_settings_within_their_time(path):
    """At the published sample sizes."""
    verdict = validate_module(path.read_text(), materials=MATERIALS)
    assert verdict.accepted, verdict.reasons
    figures = verdict.figures
    assert figures["scenarios"]["distinct"] == 100
    assert figures["policies"]["oracle"]["success_rate"] == 1.0
    assert sum(name.startswith("wrong.") for name in figures["policies"]) >= 3
    assert figures["red_team"]["attacks"] >= 20
    assert figures["sandbox"]["level"] in ("container", "bubblewrap")
    json.dumps(verdict.as_dict(), allow_nan=False)
    need = figures["need"]
    assert need["seconds"] < 60
    assert need["step"]["differing"] == need["step"]["episodes"] == 100
    assert need["step"]["success_rate"] <= 0.1
    assert set(need["unbound"]) == {"copy_examples"}
    assert "lazy.guess_and_listen" in "\n".join(verdict_lines(verdict))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("", "static: the constant STEP is missing: STEP must be"),
        ('STEP = {"tool": "fly"}', "STEP names the tool 'fly'"),
        ('STEP = {"tool": "get_order", "argument": "colour"}', "STEP names the argument 'colour'"),
        ('STEP = {"say": "something"}', "STEP must be"),
        ('STEP = {"say": "ask"}', "the oracle never takes the step"),
    ],
)
def test_a_module_without_a_step_that_can_be_left_out_is_refused_with_one_reason(step, reason):
    source = CHECK.read_text().replace('STEP = {"tool": "get_order"}', step)
    (found,) = validate_module(source).reasons
    assert reason in found


def test_a_wrong_policy_that_was_emptied_is_found():
    """It keeps its name, as it must from version to version, and would test nothing any more."""
    emptied = ADDRESS.read_text().replace('"lower": _changed(str.lower)', '"lower": lambda scenario, state, log: None')
    (reason,) = validate_module(emptied).reasons
    assert reason.startswith("level 0: wrong.lower: it never acts")


def test_an_oracle_that_succeeds_without_its_step_is_found():
    """The look-up is in the oracle and not in the goal: cancelling without having looked is right in a third."""
    source = CHECK.read_text()
    for old, new in (
        ('"calls": [look, cancel]', '"calls": [cancel]'),
        (
            'if writes != goal["calls"][1:] or not looked:',
            'if writes != [c for c in goal["calls"] if c != _look(state)]:',
        ),
        ('    calls = [e for e in log if "name" in e]\n', '    calls = [e for e in log if "name" in e]\n' + _WANTED),
        ('if len(calls) < len(scenario["goal"]["calls"]):', "if len(calls) < len(wanted):"),
        ('{"calls": [scenario["goal"]["calls"][len(calls)]]}', '{"calls": [wanted[len(calls)]]}'),
        ("def oracle(", _LOOK + "def oracle("),
    ):
        assert old in source, old
        source = source.replace(old, new, 1)
    verdict = validate_module(source)
    assert [reason for reason in verdict.reasons if "oracle still succeeds" in reason], verdict.reasons
    assert 0.1 < verdict.figures["need"]["step"]["success_rate"] < 0.6


def test_what_won_can_be_shown():
    verdict = validate_module(WEAKENINGS["volunteered_after_a_free_guess"].source)
    (shown, *_) = verdict.figures["exhibits"]
    assert shown["name"] == "listen_first" or shown["name"] == "guess_and_listen"
    assert shown["success"]
    assert shown["checks"][0]["passed"]
    assert [m["role"] for m in shown["messages"]][:2] == ["user", "assistant"]


def need_of(source: str, limits: NeedLimits | None = None, materials: Materials | None = None) -> Need:
    module = SandboxedModule(source)
    try:
        tasks = [module.scenario(seed) for seed in range(20)]
        return check_need(
            module.environment(), tasks, module.step, materials, limits, lambda: time.thread_time() + module.used
        )
    finally:
        module.close()


def test_a_slow_module_is_refused_in_bounded_time():
    """Its episodes take more of the processor than the hundredth of a second that is allowed here."""
    need = need_of(ASK.read_text(), NeedLimits(time_limit=TimeLimit(0.01, 600)))
    (reason,) = need.reasons
    assert reason.startswith("need: the module is too slow: after 0.01 s of processor time only ")
    assert " of 0.01 s of processor time, " in reason
    assert 0.01 <= need.figures["processor_seconds"] <= need.figures["seconds"]
    assert need.figures["step"]["success_rate"] == 0.0


def test_the_oracle_of_a_slow_module_is_not_played_on_either():
    """Without any time left one scenario is recorded and replayed, of twenty; only slowness is a reason."""
    need = need_of(ASK.read_text(), NeedLimits(time_limit=TimeLimit(0, 600)))
    assert need.figures["step"]["episodes"] == 1
    (reason,) = need.reasons
    assert reason.startswith("need: the module is too slow: after 0 s of processor time only 0 of 10 lazy policies")


def test_the_tests_of_need_of_a_module_that_waits_end_by_the_clock():
    (reason,) = need_of(ASK.read_text(), NeedLimits(time_limit=TimeLimit(600, 0.01))).reasons
    assert reason.startswith("need: the module is too slow: after 0.01 s on the clock only ")
    assert " of 600 s of processor time, " in reason


def test_a_fault_that_only_a_lazy_policy_provokes_is_a_reason():
    effect = '    state["claims"].append'
    fragile = ASK.read_text().replace(effect, f'    1 / (call["arguments"]["number"] >= 10000)\n{effect}')
    found = need_of(fragile).reasons
    assert "need: repeat_until_accepted provoked a fault" in "\n".join(found)
    assert "ZeroDivisionError" in found[0]


def test_a_module_that_was_accepted_before_steps_were_named_still_plays():
    module = SandboxedModule(ASK.read_text().replace('STEP = {"say": "ask"}\n', ""))
    try:
        assert module.step == {}
        assert module.environment().reset(module.scenario(0)).messages
    finally:
        module.close()


def test_values_of_examples_are_copied_where_a_module_has_some():
    shown = 'EXAMPLES = [{"role": "user", "content": "Claim 48213."}, {"role": "assistant", "tool_calls": [\n'
    shown += '    {"name": "file_claim", "arguments": {"number": 12121, "about": "late"}}]}]\n'
    source = ASK.read_text().replace("def scenario(seed, level)", shown + "\n\ndef scenario(seed, level)")
    assert need_of(source).figures["lazy"]["copy_examples"]["episodes"] == 20
    always = source.replace("number, about = rng.randint(10000, 99999)", "number, about = 12121")
    assert "need: the lazy policy copy_examples" in "\n".join(need_of(always).reasons)


def test_values_of_the_target_s_worked_examples_are_copied_too():
    """An agent that trains has them before it, whatever the module shows."""
    worked = Message("assistant", "", (ToolCall("file_claim", {"number": 12121, "about": "late"}),))
    always = ASK.read_text().replace("number, about = rng.randint(10000, 99999)", "number, about = 12121")
    assert "copy_examples" in need_of(always).figures["unbound"]
    need = need_of(always, materials=Materials(examples=(worked,)))
    assert "need: the lazy policy copy_examples" in "\n".join(need.reasons)


def test_a_request_of_the_evidence_is_no_scenario():
    source = ASK.read_text().replace(
        'f"{name} here. {_BESIDES[level][rng.randrange(3)]}My order {words}, I want to file a claim."',
        '"My parcel is gone!"',
    )
    module = SandboxedModule(source)
    try:
        tasks = [module.scenario(seed) for seed in range(5)]
        need = check_need(
            module.environment(), tasks, module.step, Materials(["user: My parcel is gone.\n1. agent: ..."])
        )
    finally:
        module.close()
    assert "5 of 5 scenarios repeat entities of other texts, e.g. seed 0 has the same request" in "\n".join(
        need.reasons
    )
