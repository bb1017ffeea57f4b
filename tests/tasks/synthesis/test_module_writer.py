"""Synthesis over HTTP: the scripted server stands in for the model and returns modules of the tests."""

import json
from pathlib import Path

import pytest

from db import ReplyRow, open_store
from environments.synthesized.module_contract import CONTRACT, worked_examples
from environments.validation.checks import Limits, ValidationVerdict
from errors import BudgetExceeded, ConfigurationError, ProviderError, SandboxError
from models.providers.analyst import Analyst, AnalystSettings
from models.providers.analyst_store import StoredReplies, StoredSpend
from models.providers.client import ModelClient
from models.providers.spending import OF_ROUND, SpendingCap
from tasks.synthesis.module_writer import Brief, SynthesisRules, result_shapes, synthesize
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
    "copy_exact_address", "Copies addresses.", ["user: EVIDENCE-1"], [TOOL], "POLICY-1", {"set_address": "ok"}
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
    for part in ("EVIDENCE-1", "POLICY-1", "set_address", "copy_exact_address", "def transition(state, call)"):
        assert part in asked
    assert CONTRACT in first[0]["content"]
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


def test_a_module_that_breaks_down_in_calibration_is_a_refused_version(run):
    def calibrate(opened):
        raise SandboxError("killed by SIGKILL")

    synthesis, _, _ = run(in_turn(module(SOUND)), calibrate)
    assert "broke down: killed by SIGKILL" in synthesis.versions[0].reasons[0]


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


def test_result_shapes_are_read_from_conversations():
    call = {"role": "assistant", "tool_calls": [{"name": "set_address", "arguments": {}, "id": "a"}]}
    answers = [{"role": "tool", "content": "x" * 999, "tool_call_id": "a"}, {"role": "tool", "content": "y"}]
    assert result_shapes([[call, *answers]]) == {"set_address": "x" * 400}


def test_the_worked_examples_are_more_than_one():
    assert len(worked_examples()) >= 2
