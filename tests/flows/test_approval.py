"""Approval on a real Prefect server: the run pauses, and goes on with what a person said."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

import flows.approval as approval
import flows.improve as improve
import flows.order as order
from db import ReleaseState, RoundState
from errors import ConfigurationError, NotApproved, StoreError
from settings import load_settings
from tasks.operations import announcements
from tasks.operations.announcements import tell_start
from tasks.round.preflight import check_approval
from tasks.unattended import alive
from tasks.unattended.notices import Notice

PROPOSAL = SimpleNamespace(
    candidate=SimpleNamespace(id="r7", number=7, state=ReleaseState.CANDIDATE),
    decision=SimpleNamespace(promoted=True),
    table=lambda: "| points |",
)


def asked(monkeypatch: pytest.MonkeyPatch, hours: float = 0.1, **changes: Any) -> SimpleNamespace:
    """A context that is to ask, and what was told and waited."""
    context = SimpleNamespace(
        settings=SimpleNamespace(unattended=SimpleNamespace(approve=True, approval_hours=hours)),
        budget=None, declined="", answered="", found=lambda kind: None, waits=[], told=[],
        round=SimpleNamespace(target="shop"),
    )  # fmt: skip
    context.limits = SimpleNamespace(waited=context.waits.append)
    vars(context).update(changes)
    monkeypatch.setattr(approval, "POLL_SECONDS", 1)
    monkeypatch.setattr(approval, "tell_question", lambda context, number: context.told.append(number))
    monkeypatch.setattr(approval, "proposal_of", lambda context: PROPOSAL)
    return context


def answer(values: dict[str, Any]) -> threading.Thread:
    """Somebody who answers the paused run."""

    def person() -> None:
        paused = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])))
        with get_client(sync_client=True) as client:
            deadline = time.monotonic() + 60
            while not (found := client.read_flow_runs(flow_run_filter=paused)):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            client.resume_flow_run(found[0].id, run_input=values)

    thread = threading.Thread(target=person)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("values", "declined"),
    [({"promote": True}, ""), ({"promote": False, "reason": "too early"}, "too early"), ({}, "no reason given")],
)
@pytest.mark.usefixtures("prefect")
def test_a_run_goes_on_with_what_a_person_said(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], declined: str
) -> None:
    context = asked(monkeypatch)
    thread = answer(values)
    flow(lambda: approval.ask_approval(context), name="asks")()  # type: ignore[arg-type]
    thread.join()
    assert (context.declined, context.told, len(context.waits)) == (declined, [7], 1)


@pytest.mark.usefixtures("prefect")
def test_a_question_outlives_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gives up while it looks for the answer; the server comes back, and only then does somebody answer."""
    context, asks, seen = asked(monkeypatch), approval.pause_flow_run, list[str]()

    def away(client: Any, flow_run_id: Any) -> Any:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    def pause(**given: Any) -> Any:
        try:
            with pytest.MonkeyPatch.context() as patch:
                if not seen:
                    patch.setattr(SyncPrefectClient, "read_flow_run", away)
                return asks(**given)
        except BaseException as problem:
            seen.append(type(problem).__name__)
            if len(seen) == 2:
                answer({"promote": False, "reason": "too early"}).join()
            raise

    monkeypatch.setattr(approval, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(approval, "pause_flow_run", pause)
    flow(lambda: approval.ask_approval(context), name="asks")()  # type: ignore[arg-type]
    assert (context.declined, context.told, seen) == ("too early", [7], ["ConnectError", "Pause"])


@pytest.mark.usefixtures("prefect")
def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    context = asked(monkeypatch, hours=1 / 3600)
    with pytest.raises(NotApproved, match=r"release 7 of shop waits .*approval_hours = 0\.000277"):
        flow(lambda: approval.ask_approval(context), name="asks")()  # type: ignore[arg-type]


def test_only_what_would_be_promoted_is_asked_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    off = SimpleNamespace(unattended=SimpleNamespace(approve=False))
    refused = SimpleNamespace(decision=SimpleNamespace(promoted=False))
    for change in ({"settings": off}, {"budget": object()}, {"found": lambda kind: object()}):
        context = asked(monkeypatch, **change)
        approval.ask_approval(context)
        assert context.told == []
    live = SimpleNamespace(number=7, state=ReleaseState.LIVE)
    published = SimpleNamespace(candidate=live, decision=PROPOSAL.decision)
    for proposal in (None, refused, published):
        context = asked(monkeypatch)
        monkeypatch.setattr(approval, "proposal_of", lambda context, made=proposal: made)
        approval.ask_approval(context)
        assert context.told == []


@pytest.mark.parametrize(("promote", "declined"), [(True, ""), (False, "too early")])
def test_who_has_answered_is_not_asked_again_when_the_store_was_away_at_the_gate(
    monkeypatch: pytest.MonkeyPatch, promote: bool, declined: str
) -> None:
    """The round waits for the store, and comes to the question again. Its person may have left."""
    context, away = asked(monkeypatch), StoreError("the database is restarted")
    context.round, away.transient = SimpleNamespace(number=3, id="r", target="shop"), True
    monkeypatch.setattr(
        approval, "pause_flow_run", lambda **given: SimpleNamespace(promote=promote, reason="too early")
    )
    left = [away]

    def gated(round_id: str) -> None:
        if left:
            raise left.pop()

    gated.name = "gate"  # type: ignore[attr-defined]
    monkeypatch.setattr(order, "PROVE", (gated,))
    monkeypatch.setattr(improve, "stages", lambda context, last: order._proven(context))
    monkeypatch.setattr(improve.time, "sleep", lambda seconds: None)
    assert [name for name, _ in improve.outlasting(context, "gate")] == ["gate"]
    assert (left, context.told, context.declined) == ([], [7], declined)
    other = SimpleNamespace(id="r8", number=8, state=ReleaseState.CANDIDATE)
    proposed = SimpleNamespace(candidate=other, decision=PROPOSAL.decision, table=PROPOSAL.table)
    monkeypatch.setattr(approval, "proposal_of", lambda context: proposed)
    approval.ask_approval(context)
    assert context.told == [7, 8], "the word is for one candidate"


def test_a_round_that_waits_for_a_person_is_not_said_to_have_died(
    settings_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"unattended": {"approve": True}, "limits": {"idle_minutes": 0}}
    settings, said = load_settings(home=settings_folder, profile="smoke", **given), list[str]()

    def notify(settings: Any, notice: Notice) -> None:
        said.append(notice.kind)

    def pause(**given: Any) -> SimpleNamespace:
        """Another process opens the round meanwhile, and is stopped by whoever began it."""
        monkeypatch.setattr(alive, "is_own_or_ended", lambda owner: False)
        with suppress(KeyboardInterrupt), improve.opened(settings, fresh=False) as other:
            assert other.round.id == waits.round.id
            tell_start(other)
            raise KeyboardInterrupt
        return SimpleNamespace(promote=True)

    asked(monkeypatch)
    monkeypatch.setattr(approval, "tell_question", lambda context, number: None)
    monkeypatch.setattr(announcements, "notify", notify)
    monkeypatch.setattr(approval, "pause_flow_run", pause)
    with improve.opened(settings, fresh=False) as waits:
        approval.ask_approval(waits)
        assert said == ["started"]
        assert waits.store.round(waits.round.id).state == RoundState.RUNNING


def test_where_nobody_can_answer_the_round_does_not_start(
    settings_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect.settings.get_current_settings", lambda: SimpleNamespace(api=SimpleNamespace(url=None)))
    check_approval(load_settings())
    with pytest.raises(ConfigurationError, match="no Prefect server is named; set PREFECT_API_URL"):
        check_approval(load_settings(unattended={"approve": True}))
