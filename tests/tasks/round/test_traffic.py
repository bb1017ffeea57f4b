"""Conversations with feedback as the target `traffic`: stored, listed, imported, contrasted; and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from db import ConversationRow, Round, Store, TrajectoryRow, open_store, writes
from db.rows.conversations import TRAFFIC
from db.values.types import utc_now
from errors import ConfigurationError, TargetError
from models.policy import PolicyIdentity
from models.router.router import RouteDecision
from models.serving.gateway import traffic_log
from models.serving.gateway.conversations import Routed
from models.serving.gateway.traffic_log import Feedback, LoggedTurn, TrafficLog
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import ChatRequest, Usage
from models.serving.upstreams.contract import Turn, TurnResult
from settings import load_settings
from tasks.contrast import contrast
from tasks.round.results import RolloutResult
from tasks.round.stored import StoredRound
from tasks.round.target_prompt import context_text, first_opening
from tasks.round.traffic import ANSWERED, TrafficTarget, check_stage, import_conversations
from tasks.select import select
from tests.tasks.mining.test_labelling import ScriptedAsker

TOOLS = [{"type": "function", "function": {"name": "findOrder"}}]


def spoken(name: str, result: str, owner: str = "", capability: str = "refund_payment") -> LoggedTurn:
    call = {"id": "c1", "type": "function", "function": {"name": "findOrder", "arguments": '{"order": 7}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Refund 7."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    heard = TurnResult({"role": "assistant", "content": f"It is {result}."}, "stop", Usage(50, 6))
    decision = RouteDecision(capability, {"refund_payment": 0.75, "": 0.25}, (), 12.0, "retrieval")
    turn = Turn(ChatRequest("trace", True, {}, messages, tools=TOOLS), None, "base", name, None, True, heard)
    return LoggedTurn(owner, Routed(name, decision, "router1", 1, ""), turn, 0.5)


def asked(spoken: LoggedTurn, messages: list[Any], **other: Any) -> LoggedTurn:
    """This turn of a client that has sent these."""
    return replace(spoken, turn=replace(spoken.turn, asked=replace(spoken.turn.asked, messages=messages), **other))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as opened:
        yield opened


@pytest.fixture
def counts() -> list[str]:
    return []


@pytest.fixture
def log(store: Store, counts: list[str]) -> Any:
    kept = TrafficLog(store, PolicyIdentity("tiny", "1"), "shop", 1.0, counts.append)
    yield kept
    kept.close()


def test_a_conversation_is_one_row_that_grows(store: Store, log: TrafficLog, counts: list[str]) -> None:
    log.add(spoken("c", "pending"))
    heard = [{"role": "assistant", "content": "It is pending."}, {"role": "user", "content": "And now?"}]
    log.add(asked(spoken("c", "shipped"), [*spoken("c", "pending").turn.asked.messages, *heard]))
    log.flush()
    (row,) = store.rows(ConversationRow)
    assert (row.conversation, row.turns, row.prompt_tokens, row.seconds) == ("c", 2, 100, 1.0)
    assert row.messages[-1] == {"role": "assistant", "content": "It is shipped."}
    assert row.messages[0]["role"] == "system"
    assert row.probabilities == {"refund_payment": 0.75, "none": 0.25}
    assert (row.tools, row.success, counts) == (["findOrder"], None, ["stored", "stored"])


def test_a_turn_that_is_asked_again_is_one_turn(store: Store, log: TrafficLog) -> None:
    """After a restart, too: what is stored counts."""

    def ask(*messages: str, answer: str = "Done.") -> int:
        said = [{"role": "user" if i % 2 == 0 else "assistant", "content": m} for i, m in enumerate(messages)]
        log.add(asked(spoken("c", "ok"), said, heard=TurnResult({"role": "assistant", "content": answer})))
        log.flush()
        return store.rows(ConversationRow)[0].turns

    assert [ask("a"), ask("a"), ask("a", answer="Yes.")] == [1, 1, 1]
    before = TrafficTarget(store).data_hash
    say(log, "", Feedback("c", success=True))
    judged = TrafficTarget(store).data_hash
    assert [ask("a", "Yes.", "b"), ask("a", "Yes.", "b"), ask("a", "Yes.", "b", "Done.", "c")] == [2, 2, 3]
    assert ask("a", answer="No.") == 1, "its client has gone back to the beginning"
    say(log, "", Feedback("c", success=True))
    assert len({before, judged, TrafficTarget(store).data_hash}) == 3, "another answer is other data"
    assert ask("x") == 1, "another conversation under the same id"
    assert [ask("x", "Done.", "y", "Done.", "z"), ask("x")] == [2, 1], "who gave an answer said elsewhere is not known"


def say(log: TrafficLog, owner: str, feedback: Feedback) -> dict[str, Any]:
    return asyncio.run(log.say(owner, feedback))


def test_feedback_finds_its_conversation_and_nobody_elses(store: Store, log: TrafficLog) -> None:
    log.add(spoken("c", "ok", owner="anna"))
    assert say(log, "anna", Feedback("c", reward=0.25))["success"] is False
    said = say(log, "anna", Feedback("c", success=True, comment="after all"))
    assert (said["success"], said["reward"], said["comment"]) == (True, 0.25, "after all")
    with pytest.raises(ApiError, match="not stored") as missing:
        say(log, "bert", Feedback("c", success=False))
    assert missing.value.status == 404
    assert store.rows(ConversationRow)[0].success is True
    # What is said stays when the conversation goes on.
    log.add(spoken("c", "ok", owner="anna"))
    log.flush()
    assert store.rows(ConversationRow)[0].comment == "after all"


def test_feedback_that_is_taken_back_leaves_nothing_of_it(log: TrafficLog) -> None:
    """What follows from a reward, or from a success, follows from the next one."""
    log.add(spoken("c", "ok"))

    def said(**word: Any) -> tuple[bool, float]:
        kept = say(log, "", Feedback("c", **word))
        return kept["success"], kept["reward"]

    assert [said(reward=1.0), said(reward=0.0), said(comment="no")] == [(True, 1.0), (False, 0.0), (False, 0.0)]
    assert [said(success=True), said(success=False)] == [(True, 1.0), (False, 0.0)]
    assert [said(reward=0.75), said(success=False)] == [(True, 0.75), (False, 0.75)], "what was said of both stays"
    assert [said(reward=0.9), said(success=True, reward=0.2)] == [(False, 0.9), (True, 0.2)]


def test_one_id_at_two_targets_is_two_conversations(store: Store, log: TrafficLog) -> None:
    """A client gives its session's id to the gateways of both."""
    other = TrafficLog(store, PolicyIdentity("tiny", "1"), "tau2:retail", 1.0, lambda _: None)
    for by, name in ((log, "c"), (other, "c"), (log, "c"), (other, "c"), (log, "d")):
        by.add(spoken(name, by._target))
        by.flush()
    say(other, "", Feedback("c", success=False))
    say(other, "", Feedback("d", success=True))  # any gateway of the home may be told
    rows = [(r.conversation, r.target, r.messages[-1]["content"], r.success) for r in store.rows(ConversationRow)]
    one, two = ("c", "shop", "It is shop.", None), ("c", "tau2:retail", "It is tau2:retail.", False)
    assert sorted(rows) == [one, two, ("d", "shop", "It is shop.", True)]
    other.close()


def test_feedback_leaves_with_the_words_that_it_was_about(store: Store, log: TrafficLog) -> None:
    """A turn that is asked again has another answer; one that goes on comes back as clients write it."""
    first = spoken("c", "wrong")
    log.add(first)
    say(log, "", Feedback("c", success=False, comment="no"))
    back = {"role": "assistant", "content": [{"type": "text", "text": "It is wrong. "}], "name": "shop"}
    log.add(asked(first, [*first.turn.asked.messages, back, {"role": "user", "content": "Again."}]))
    log.flush()
    (row,) = store.rows(ConversationRow)
    assert (row.success, row.comment) == (False, "no")
    log.add(spoken("c", "right"))
    log.flush()
    (row,) = store.rows(ConversationRow)
    assert (row.success, row.reward, row.comment, row.feedback_at) == (None, None, "", None)


class Meanwhile(dict[str, float]):
    """A router's probabilities, with what happens when they are looked at."""

    then: Callable[[], object]

    def items(self) -> Any:
        self.then()
        return super().items()


@pytest.mark.parametrize("gateways", [1, 2])
def test_feedback_and_the_next_turn_do_not_overwrite_each_other(
    store: Store, log: TrafficLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gateways: int
) -> None:
    """Each comes when the other has read the row and has not written it, in one gateway or from a second one."""
    begun: list[Future[object]] = []
    with open_store(f"sqlite:///{tmp_path}/trace.db") as seconds, ThreadPoolExecutor() as pool:
        second = TrafficLog(seconds, PolicyIdentity("tiny", "1"), "shop", 1.0, lambda _: None)
        other = log if gateways == 1 else second

        def meanwhile(write: Callable[[], object]) -> None:
            begun.append(pool.submit(write))
            wait(begun, 0.3)  # it ends now, or waits for the row

        def stored(by: TrafficLog, then: Callable[[], object] = lambda: None) -> None:
            turn, probabilities = spoken("c", "ok"), Meanwhile()
            probabilities.then = then
            routed = replace(turn.routed, decision=replace(turn.routed.decision, probabilities=probabilities))
            by.add(replace(turn, routed=routed))
            by.flush()

        def now() -> datetime:
            meanwhile(lambda: stored(other))
            return utc_now()

        wrong = Feedback("c", success=False, comment="wrong refund")
        stored(log)
        stored(log, lambda: meanwhile(lambda: say(other, "", wrong)))
        wait(begun)
        (row,) = store.rows(ConversationRow)
        assert (row.prompt_tokens, row.success, row.comment) == (100, False, "wrong refund")
        monkeypatch.setattr(traffic_log, "utc_now", now)
        say(log, "", Feedback("c", success=True))
        wait(begun)
        (row,) = store.rows(ConversationRow)
        assert (row.prompt_tokens, row.success) == (150, True)
        second.close()


def test_the_sample_takes_conversations_whole(store: Store) -> None:
    log = TrafficLog(store, PolicyIdentity("tiny", "1"), "shop", 0.25, lambda _: None)
    wanted = [log.wants(f"conversation {i}") for i in range(2000)]
    assert 0.2 < sum(wanted) / 2000 < 0.3
    assert wanted == [log.wants(f"conversation {i}") for i in range(2000)]
    log.close()


def filled(store: Store, log: TrafficLog) -> None:
    for i in range(12):
        bad = i % 3 == 0
        log.add(spoken(f"c{i}", "error: no order" if bad else "pending", capability="" if i % 2 else "refund_payment"))
        if i < 10:
            say(log, "", Feedback(f"c{i}", success=not bad, comment="wrong" if bad else ""))


def test_import_keeps_what_was_said_and_done(store: Store, log: TrafficLog) -> None:
    empty = store.start_round(TRAFFIC, "0", 0, "laptop", {})
    with pytest.raises(TargetError, match="no conversation has feedback"):
        import_conversations(store, empty, TrafficTarget(store))
    filled(store, log)
    target = TrafficTarget(store)
    assert len(target.tasks("diagnosis")) == 10
    assert target.tasks("test") == []
    with pytest.raises(TargetError, match="cannot be played again"):
        target.environment()
    current = store.start_round(TRAFFIC, target.data_hash, 0, "laptop", {})
    ids = import_conversations(store, current, target)
    say(log, "", Feedback("c11", success=True))
    assert import_conversations(store, current, TrafficTarget(store)) == ids, "a round keeps what it began with"
    assert TrafficTarget(store).data_hash != target.data_hash
    frame = store.trajectory_frame(current.id)
    assert (len(frame), frame["success"].sum(), set(frame["split"])) == (10, 6, {"diagnosis"})
    row = store.trajectory(ids[0])
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert len(row.steps) == 2
    checks = {c.kind: c.passed for c in row.checks}
    assert checks["call_find_order"] is bool(row.success)
    assert checks[ANSWERED] is True


def test_an_import_that_dies_halfway_is_made_whole_by_the_next(
    store: Store, log: TrafficLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store, log)
    row = next(row for row in store.rows(ConversationRow) if row.success is not None)
    store.put([replace(row, id=f"more {i}", conversation=f"more {i}") for i in range(600)])
    target = TrafficTarget(store)
    current = store.start_round(TRAFFIC, target.data_hash, 0, "laptop", {})
    left, whole = iter(range(600)), writes.step_values

    def dies(row: TrajectoryRow) -> Any:
        if next(left, None) is None:
            raise SystemExit("killed")
        return whole(row)

    with monkeypatch.context() as patched:
        patched.setattr(writes, "step_values", dies)
        with pytest.raises(SystemExit):
            import_conversations(store, current, target)
    assert len(import_conversations(store, current, target)) == len(target.conversations) == 610


def test_a_conversation_that_cannot_be_read_is_left_out_and_the_others_are_not(
    store: Store, log: TrafficLog, caplog: pytest.LogCaptureFixture
) -> None:
    filled(store, log)
    before = TrafficTarget(store).data_hash
    row = store.rows(ConversationRow)[0]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    call = {"id": "c", "function": {"name": "findOrder", "arguments": '{"order": '}}
    cut = {"role": "assistant", "content": None, "tool_calls": [call]}
    for name, message in (("image", image), ("cut", cut)):
        store.put([replace(row, id=name, conversation=name, success=True, messages=[message])])
    target = TrafficTarget(store)
    assert target.data_hash == before
    assert "conversation image is left out of traffic: messages[0].content holds" in caplog.text
    assert "conversation cut is left out" in caplog.text
    current = store.start_round(TRAFFIC, target.data_hash, 0, "laptop", {})
    assert len(import_conversations(store, current, target)) == len(target.tasks("diagnosis")) == 10


def mined(store: Store, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, Any]:
    """What the stages contrast and select come to in a round on the stored conversations."""
    for name in ("tasks.select.create_table_artifact", "tasks.mining.llm_analyst._show"):
        monkeypatch.setattr(name, lambda *given, **more: None)
    target = TrafficTarget(store)
    current = store.start_round(TRAFFIC, target.data_hash, 0, "laptop", {})
    rolled = RolloutResult(release=0, trajectories=import_conversations(store, current, target), lost=0, success=0.6)
    asker = ScriptedAsker()
    asker.settings = SimpleNamespace(model="m")
    stored = StoredRound(store, current)
    context: Any = SimpleNamespace(
        store=store, round=current, target=target, seed=0, parent=None, analyst=asker, stored=stored,
        settings=load_settings(target=TRAFFIC, **settings), result=stored.result, found=stored.found,
    )  # fmt: skip
    finished(store, current, rolled)
    found = contrast._work(context)
    finished(store, current, found)
    return found, select._work(context)


def finished(store: Store, current: Round, result: Any) -> None:
    row = store.stage(current.id, result.stage)
    row.claim(lease_seconds=60)
    row.finish(result.model_dump(mode="json"))


def test_what_the_generalist_failed_at_is_selected_as_any_other(
    store: Store, log: TrafficLog, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(12):
        log.add(spoken(f"c{i}", "pending", capability="generalist"))
        say(log, "", Feedback(f"c{i}", success=i % 3 > 0))
    _, selected = mined(store, monkeypatch)
    assert selected.selected == ["generalist"]


def test_a_language_model_reads_the_conversations_themselves(
    store: Store, log: TrafficLog, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.add(spoken("old", "pending"))  # without feedback
    for i in range(12):
        passed = i % 3 > 0
        log.add(spoken(f"c{i}", "get_order said so" if passed else "error"))
        say(log, "", Feedback(f"c{i}", success=passed))
    text = context_text(TrafficTarget(store))
    assert text == '## Policy\nBe brief.\n\n## Tools\n{"name": "findOrder"}'
    found, selected = mined(store, monkeypatch, analyst={"kind": "llm", "model": "m"})
    assert (found.analyst, found.runs, found.labels) == ("llm", 10, 10 * 12 * 2)
    assert selected.selected == ["check_before_cancel"]
    with pytest.raises(TargetError, match="cannot be played again"):
        first_opening(TrafficTarget(store))


def test_conversations_that_say_nothing_are_not_even_read(store: Store, log: TrafficLog) -> None:
    filled(store, log)
    asked: list[dict[str, Any]] = []

    class Watched:
        def rows(self, kind: Any, **equals: Any) -> Any:
            found = store.rows(kind, **equals)
            asked.extend({"success": row.success} for row in found)
            return found

    watched: Any = Watched()
    assert len(TrafficTarget(watched).conversations) == len(asked) == 10


def test_a_round_on_traffic_goes_up_to_select(
    prefect: None, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.cli.main import app
    from flows.improve import ImproveParameters, improve, until

    home = settings_folder / "runs"
    runner, targets = CliRunner(), ["targets", "--json"]
    assert TRAFFIC not in {r["name"] for r in json.loads(runner.invoke(app, targets).stdout)}
    assert not home.exists(), "looking created something"
    home.mkdir()
    with open_store(f"sqlite:///{home}/trace.db") as store:
        log = TrafficLog(store, PolicyIdentity("tiny", "1"), "shop", 1.0, lambda _: None)
        filled(store, log)
        log.close()
    listed = {r["name"]: r for r in json.loads(runner.invoke(app, targets).stdout)}
    assert listed[TRAFFIC]["splits"] == {"diagnosis": 10}
    result = until("select", ImproveParameters(target=TRAFFIC, home=home))
    assert result["selected"][0] == "call_find_order"
    for stage in ("synthesize", "evaluate"):
        with pytest.raises(ConfigurationError, match="cannot; on target 'traffic'"):
            until(stage, ImproveParameters(target=TRAFFIC, home=home))
    with pytest.raises(ConfigurationError, match="a whole round"):
        improve(ImproveParameters(target=TRAFFIC, home=home))
    check_stage("shop", "evaluate")
