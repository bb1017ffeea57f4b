"""Synthesis over HTTP: the scripted server stands in for the model and returns modules of the tests."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from db import ReplyRow, open_store
from environments.sandbox.workers import WorkerNotStarted
from environments.synthesized.module_contract import CONTRACT, worked_examples
from environments.validation.checks import Limits, ValidationVerdict
from errors import BudgetExceeded, ConfigurationError, ProviderError, SandboxError, TargetError
from models.providers.analyst import Analyst, AnalystSettings
from models.providers.analyst_store import StoredReplies, StoredSpend
from models.providers.client import ModelClient
from models.providers.spending import OF_ROUND, SpendingCap
from tasks.synthesis.author_request import EPISODE_TOKENS, Brief, Version
from tasks.synthesis.module_writer import SynthesisRules, dropped_wrong, judge_module, synthesize
from tasks.synthesis.target_material import ToolAnswers
from tasks.unattended.stalls import watched
from tests.environments.synthesized.weakenings import WEAKENINGS
from tests.models.providers.scripted_analyst import ScriptedAnalyst, failed, good, in_turn, refused, slow, truncated

TESTS = Path(__file__).parents[2]

MODULES = TESTS / "environments" / "synthesized" / "modules"
SOUND = (MODULES / "sound_copy_address.py").read_text()
LEAKY = (MODULES / "flawed_leaky_reward.py").read_text()
ESCAPING = (MODULES / "flawed_escaping.py").read_text()
LIMITS = Limits(distinct=30, searched=60, episodes=30, attack_seeds=1, replayed=4)
TOOL = {
    "type": "function",
    "function": {
        "name": "set_address",
        "description": "The target's own words.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string"}, "address": {"type": "string"}},
            "required": ["order_id", "address"],
        },
    },
}
BRIEF = Brief(
    "copy_exact_address",
    "Copies addresses.",
    ["user: EVIDENCE-1"],
    [TOOL],
    "POLICY-1",
    {"set_address": ToolAnswers("ANSWER-GOOD", "ANSWER-FAILING")},
    "THE-BAND",
)

pytestmark = pytest.mark.integration


def module(source):
    return good({"module": source})


def in_band(opened):
    assert opened.capability == "copy_exact_address"
    assert opened.scenario(1).payload["scenario"]["request"]
    return ValidationVerdict(True, (), {"success_rate": 0.4})


@pytest.fixture
def run(tmp_path):
    """run(script, calibrate) -> (synthesis, server, store)"""
    opened = []

    def start(script, calibrate=in_band, known=(), keep=lambda version: None, **settings):
        store = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
        server = ScriptedAnalyst(script).__enter__()
        round_id = store.start_round("shop", "hash", 0, "test", {}).id
        base = {"backoff_seconds": 0.01, "deadline_seconds": 5.0, "attempts": 3}
        model = settings.pop("model", "hosted_vllm/scripted")
        options = AnalystSettings(model, server.api_base, **base | settings)
        client = ModelClient(SpendingCap(options.limits, refusal=OF_ROUND), StoredSpend(store, round_id))
        analyst = Analyst(options, client, StoredReplies(store))
        opened.append((analyst, server, store))
        return synthesize(analyst, BRIEF, calibrate, SynthesisRules(LIMITS), known, keep), server, store

    yield start
    for analyst, server, store in opened:
        analyst.client.close()
        server.__exit__()
        store.close()


def test_failures_go_back_with_figures_until_a_version_is_accepted(run):
    synthesis, server, _ = run(in_turn(module(LEAKY), module(ESCAPING), module(SOUND)))
    assert synthesis.state == "accepted"
    assert [version.accepted for version in synthesis.versions] == [False, False, True]
    assert synthesis.accepted.source == SOUND
    assert len(synthesis.accepted.code_hash) == 64
    assert synthesis.accepted.sandbox_level == "bubblewrap"
    assert synthesis.accepted.verdicts["calibration"]["figures"] == {"success_rate": 0.4}
    assert len({version.request_hash for version in synthesis.versions}) == 3
    json.dumps([dict(version.verdicts) for version in synthesis.versions], allow_nan=False)
    first, second, third = (request["messages"] for request in server.requests)
    asked = first[1]["content"]
    for part in (
        "EVIDENCE-1",
        "POLICY-1",
        "good: ANSWER-GOOD",
        "failing: ANSWER-FAILING",
        "set_address",
        "copy_exact_address",
        "def transition(state, call)",
    ):
        assert part in asked
    assert CONTRACT in first[0]["content"]
    assert "THE-BAND" in first[0]["content"]
    assert "Version 1 was refused" in second[-1]["content"]
    assert "constant_done" in second[-1]["content"]
    assert "95 % interval" in second[-1]["content"]
    assert "import of os is forbidden" in third[-1]["content"]
    assert "version 1: " in third[-1]["content"]


def test_after_five_versions_it_is_unsynthesizable_with_every_reason(run):
    synthesis, server, _ = run(in_turn(module(LEAKY)))
    assert synthesis.state == "unsynthesizable"
    assert synthesis.accepted is None
    assert len(synthesis.versions) == len(server.requests) == 5
    assert all(version.reasons for version in synthesis.versions)


def test_what_a_stopped_attempt_judged_is_neither_asked_nor_judged_again(run):
    kept = []
    synthesis, server, _ = run(in_turn(module(LEAKY), module(SOUND)), keep=kept.append)
    assert kept == list(synthesis.versions)
    again, other, _ = run(in_turn(module(SOUND)), known=kept[:1])
    assert [version.number for version in again.versions] == [1, 2]
    # The same question as before: its answer is in the cache.
    assert (len(server.requests), len(other.requests)) == (2, 0)
    assert again.versions[0] is kept[0]
    done, silent, _ = run(in_turn(failed(500)), known=kept)
    assert done.accepted is kept[1]
    assert silent.requests == []


def test_the_figures_of_calibration_go_back(run):
    refusing = ValidationVerdict(False, ("too easy",), {"success_rate": 0.875, "seconds": 3.0})
    verdicts = iter([refusing])
    _, server, _ = run(
        in_turn(module(SOUND), module(SOUND + "\n# harder\n")), lambda opened: next(verdicts, None) or in_band(opened)
    )
    assert "success_rate 0.875" in server.requests[1]["messages"][-1]["content"]
    assert "seconds" not in server.requests[1]["messages"][-1]["content"].split("## Version 1")[1]


def test_calibration_comes_last_and_its_reasons_go_back(run):
    verdicts = iter([ValidationVerdict(False, ("success rate 0.9 is above 0.6",), {"success_rate": 0.9})])
    synthesis, server, _ = run(
        in_turn(module(SOUND), module(SOUND + "\n# harder\n")), lambda opened: next(verdicts, None) or in_band(opened)
    )
    assert synthesis.versions[0].reasons == ("calibration: success rate 0.9 is above 0.6",)
    assert synthesis.state == "accepted"
    assert "success rate 0.9 is above 0.6" in server.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize("before", ["```python\n", "```\n", "\n```py\n"])
def test_a_fence_around_the_module_is_no_part_of_it(run, before):
    synthesis, server, _ = run(in_turn(module(f"{before}{SOUND}```\n")))
    assert [version.reasons for version in synthesis.versions] == [()]
    assert synthesis.accepted.source == SOUND
    assert len(server.requests) == 1


def test_a_module_that_breaks_down_in_calibration_is_a_refused_version(run):
    def calibrate(opened):
        raise SandboxError("killed by SIGKILL")

    synthesis, _, _ = run(in_turn(module(SOUND)), calibrate)
    assert "broke down: killed by SIGKILL" in synthesis.versions[0].reasons[0]


def test_a_sandbox_that_starts_no_more_in_calibration_costs_no_version(run):
    def calibrate(opened):
        raise WorkerNotStarted("no worker could be started: too many open files")

    with pytest.raises(WorkerNotStarted, match="too many open files"):
        run(in_turn(module(SOUND)), calibrate)


def test_a_module_that_is_being_judged_is_seen_to_move(monkeypatch, tmp_path):
    """A slow one would else look like a process that hangs, which ends itself."""
    looked = []
    monkeypatch.setattr("tasks.unattended.stalls._arm", lambda: looked.append(1))
    monkeypatch.setattr("tasks.unattended.stalls.MOST_OFTEN", 0.0)
    with watched(0.001, tmp_path):
        judge_module(SOUND, "r", BRIEF, lambda opened: ValidationVerdict(True, (), {}), LIMITS, ())
    assert len(looked) > 100


def test_what_a_module_breaks_in_calibration_is_a_reason_and_a_limit_of_the_round_is_none(monkeypatch):
    errors = iter([KeyError("name"), TargetError("use tools of one task"), BudgetExceeded("the round is over")])
    accepted = ValidationVerdict(True, (), {"sandbox": {"level": "bubblewrap"}})
    monkeypatch.setattr("tasks.synthesis.module_writer.validate_module", lambda *given, **more: accepted)

    def calibrate(opened):
        raise next(errors)

    for said in ("KeyError: 'name'", "use tools of one task"):
        version = judge_module(SOUND, "r", BRIEF, calibrate, LIMITS, ())
        assert version.reasons == (f"calibration: the module broke down: {said}",)
    with pytest.raises(BudgetExceeded, match="the round is over"):
        judge_module(SOUND, "r", BRIEF, calibrate, LIMITS, ())


def test_another_capability_or_tool_is_refused(run):
    renamed = SOUND.replace('CAPABILITY = "copy_exact_address"', 'CAPABILITY = "something_else"')
    tooled = SOUND.replace('"set_address"', '"set_price"')
    synthesis, _, _ = run(in_turn(module(renamed), module(tooled), module(SOUND)))
    assert "CAPABILITY is 'something_else'" in synthesis.versions[0].reasons[0]
    assert "the target has no tool 'set_price'" in synthesis.versions[1].reasons[0]


def test_the_stage_ends_well_on_every_kind_of_reply(run):
    steps = [good("not json"), truncated(), failed(429), failed(500), slow({"module": SOUND}, 0.2)]
    synthesis, _, store = run(in_turn(*steps))
    assert synthesis.state == "accepted"
    # Not JSON, and its repair truncated: a version without source. Then two retries, and the slow good one.
    assert synthesis.versions[0].source == ""
    assert store.query("SELECT SUM(calls) AS calls FROM spend")["calls"][0] == 5
    refusing, _, _ = run(in_turn(refused("No.")), model="hosted_vllm/refusing")
    assert refusing.state == "unsynthesizable"
    assert all("refused to answer: No." in version.reasons[0] for version in refusing.versions)
    with pytest.raises(ProviderError) as found:
        run(in_turn(failed(500)), model="hosted_vllm/broken")
    assert found.value.transient
    with pytest.raises(ConfigurationError):
        run(in_turn(failed(401)), model="hosted_vllm/locked")


@pytest.mark.parametrize("status", [402, 413, 422])
def test_a_call_that_cannot_be_paid_uses_up_no_version(run, status):
    with pytest.raises(ProviderError, match=str(status)):
        run(in_turn(failed(status)))


def test_caps_stop_it_with_what_was_answered_kept(run, tmp_path):
    with pytest.raises(BudgetExceeded, match="calls"):
        run(in_turn(module(LEAKY)), max_calls=2)
    store = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
    assert len(store.rows(ReplyRow)) == 2
    store.close()


def test_without_a_sandbox_nothing_is_asked(run, monkeypatch):
    monkeypatch.setenv("TRACE_SANDBOX", "container")
    monkeypatch.delenv("TRACE_SANDBOX_IMAGE", raising=False)
    asked = []
    with pytest.raises(SandboxError):
        run(lambda number, request: asked.append(1))
    assert asked == []


def episode(reward, name="the agent that will train, worst episode"):
    said = [{"role": "user", "content": "Move A-1."}, {"role": "assistant", "content": f"I give up after {reward}."}]
    checks = [{"name": "call_0_set_address", "required": True, "passed": False, "detail": ""}]
    return {"name": name, "reward": reward, "success": False, "checks": checks, "messages": said}


def test_episodes_of_the_base_go_back_within_a_bound(run):
    endless = episode(0.3, "the agent that will train, best episode")
    endless["messages"] = [
        {"role": "user", "content": "x"},
        *({"role": "assistant", "content": f"word {n} " * 300} for n in range(50)),
    ]
    refusing = ValidationVerdict(False, ("too hard",), {"exhibits": [episode(0.1), endless, *[episode(0.0)] * 20]})
    verdicts = iter([refusing])
    _, server, _ = run(
        in_turn(module(SOUND), module(SOUND + "\n# easier\n")), lambda opened: next(verdicts, None) or in_band(opened)
    )
    said = server.requests[1]["messages"][-1]["content"].split("## Version 1\n")[0]
    assert (
        "worst episode: reward 0.10, no success\nchecks: call_0_set_address FAILED\n<recording>\nuser: Move A-1."
        in said
    )
    assert "I give up after 0.1." in said
    assert said.count("\nchecks: ") == 3
    assert len(said) < 3 * 3 * EPISODE_TOKENS + 5000


def test_the_episode_of_a_lazy_policy_that_won_goes_back(run):
    paid = SOUND.replace("(0.0, 0.2, 1.0)[right]", "(0.6, 0.7, 1.0)[right]")
    synthesis, server, _ = run(in_turn(module(paid), module(SOUND)))
    assert "need: the lazy policy call_every_tool_once" in "\n".join(synthesis.versions[0].reasons)
    said = server.requests[1]["messages"][-1]["content"]
    assert re.search(r"### \w+: reward 0\.[67]0, no success\nchecks: call_0_set_address FAILED", said)
    assert "agent calls set_address" in said


def test_wrong_policies_may_only_become_more(run):
    dropping = SOUND.replace('    "spaced": _changed(lambda a: a + " "),\n', '    "upper": _changed(str.upper),\n')
    flawed = SOUND.replace("import random", "import os\nimport random")
    synthesis, server, _ = run(in_turn(module(flawed), module(dropping), module(SOUND)))
    (reason,) = synthesis.versions[1].reasons
    assert reason.startswith("contract: WRONG has no spaced any more")
    # Version 2 added one: the third, which has only the first ones, drops that.
    assert "WRONG has no upper any more" in synthesis.versions[2].reasons[0]
    assert "WRONG has no spaced" in server.requests[2]["messages"][-1]["content"]


def test_dropped_policies_are_named_whether_or_not_their_module_was_loaded():
    verdicts = {"validation": {"figures": {"wrong": ["guess", "give_up"]}}}
    loaded = Version(1, "", "", False, ("r",), verdicts, "", "")
    unread = Version(2, "WRONG = {'late': 1}", "", False, ("r",), {}, "", "")
    assert dropped_wrong("WRONG = {'guess': 1}", (), [loaded, unread]) == ["give_up", "late"]
    assert dropped_wrong("", ("guess", "late", "give_up", "more"), [loaded, unread]) == []


def test_a_module_that_copies_from_the_tools_answers_is_refused():
    shown = ToolAnswers("set_address A-640 7 Mill Road, 80231 -> ok", "set_address A-317 20 Oak Lane, 55512 -> error")
    brief = replace(BRIEF, answers={"set_address": shown})
    copying = WEAKENINGS["copied_addresses_of_the_evidence"].source
    reasons = judge_module(copying, "r", brief, in_band, LIMITS, ()).reasons
    assert "as an answer of set_address that you were shown" in "; ".join(reasons)
    assert judge_module(SOUND, "r", brief, in_band, LIMITS, ()).accepted


def test_the_worked_examples_are_more_than_one():
    assert len(worked_examples()) >= 2
