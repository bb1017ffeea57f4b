"""The gate's verdict with a person's word: what is stored, what is promoted, what is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasks.gate as gate_file
from db import ReleaseRow, ReleaseState, VerdictRow
from settings import load_settings
from tasks.gate import Proposal, gate
from tasks.measuring.decisions import GateVerdict, ReleaseDecision
from tasks.measuring.statistics import PairedDifference
from tasks.methods.seed.budget import Account
from tasks.operations import announcements
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult
from tasks.round.stage import forget, open_context
from tasks.unattended.notices import Notice

GAIN = PairedDifference(points=12.5, low=4.0, high=21.0, p=0.003, tasks=48, changed=12, left_out=0, floor_p=1e-3)


def decision(verdict: GateVerdict) -> ReleaseDecision:
    return ReleaseDecision(
        verdict, ("It is better.",), GAIN, None, {"refund_payment": GAIN}, None, {"cancel": GAIN}, {}, {}, True,
        None, 2, 8.0, 0.05, 1,
    )  # fmt: skip


@pytest.fixture
def context(settings_folder: Path) -> Iterator[Context]:
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    yield opened
    forget(opened.round.id)


@pytest.fixture
def judged(context: Context, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The gate on a candidate with this verdict; what was told."""
    said: list[Notice] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: said.append(notice))
    monkeypatch.setattr(gate_file, "create_markdown_artifact", lambda **given: None)
    monkeypatch.setattr(gate_file, "promote", lambda store, registry, release, reason: None)
    candidate = ReleaseRow(
        id="r7", target="shop", number=7, base="b", base_revision="1", data_hash="d", members={},
        state=ReleaseState.CANDIDATE,
    )  # fmt: skip
    context.store.put([candidate])
    challenged = ChallengeResult(passed=["refund_payment"], verdicts={"refund_payment": "better"})

    def judge(verdict: GateVerdict, state: ReleaseState = ReleaseState.CANDIDATE) -> tuple[Any, Notice]:
        made = Proposal(replace(candidate, state=state), challenged, EvaluateResult(), decision(verdict))
        monkeypatch.setattr(gate_file, "proposal_of", lambda context: made)
        return gate.do(context), said[-1]

    return judge


def test_what_nobody_declined_is_promoted(context: Context, judged: Any) -> None:
    result, notice = judged(GateVerdict.PROMOTED)
    assert (result.release, result.promoted) == (7, ["refund_payment"])
    assert (notice.kind, notice.text) == ("promoted", "release 7 of shop is live: It is better.")
    assert notice.details["verdicts"] == {"refund_payment": "better", "release": "promoted"}


def test_what_a_person_declined_is_refused_with_the_reason(context: Context, judged: Any) -> None:
    context.declined = "the tone is wrong"
    result, notice = judged(GateVerdict.PROMOTED)
    assert (result.release, result.promoted) == (0, [])
    row = context.store.row(VerdictRow, round_id=context.round.id, subject="release")
    assert row is not None
    assert (row.verdict, row.reasons[-1]) == ("declined", "A person declined it: the tone is wrong.")
    release = context.store.row(ReleaseRow, id="r7")
    assert release is not None
    assert release.state == ReleaseState.REFUSED
    assert notice.kind == "refused"


def test_what_was_rolled_back_while_the_gate_ran_again_stays_so(
    context: Context, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate had died after its promotion: it reads a live release, and a person takes that back meanwhile."""
    history, plain = [{"state": "rolled-back"}], gate_file._evidence

    def rolled_back(*given: Any) -> dict[str, object]:
        context.store.set_state(ReleaseRow, "r7", ReleaseState.ROLLED_BACK, evidence={"history": history})
        return plain(*given)

    monkeypatch.setattr(gate_file, "_evidence", rolled_back)
    context.store.set_state(ReleaseRow, "r7", ReleaseState.LIVE)
    judged(GateVerdict.PROMOTED, ReleaseState.LIVE)
    release = context.store.row(ReleaseRow, id="r7")
    assert release is not None
    assert release.state == ReleaseState.ROLLED_BACK
    assert (release.evidence["history"], release.evidence["points"]) == (history, 12.5)


def test_nobody_is_told_of_a_release_that_only_a_comparison_of_methods_has(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its rounds, placebos and ablations among them, would announce a live release that answers nobody."""
    said: list[Notice] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: said.append(notice))
    context.budget = Account.open(context.store, "trace", 100)
    announcements.tell_verdict(context, 1, {"release": "promoted"}, "It is better.")
    announcements.tell_verdict(context, 0, {}, "no capability was trained")
    assert said == []
    context.budget = None
    announcements.tell_verdict(context, 1, {"release": "promoted"}, "It is better.")
    assert [notice.text for notice in said] == ["release 1 of shop is live: It is better."]


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [(GateVerdict.UNDERPOWERED, "underpowered"), (GateVerdict.REGRESSION, "refused")],
)
def test_each_verdict_is_told_as_what_it_is(judged: Any, verdict: GateVerdict, kind: str) -> None:
    result, notice = judged(verdict)
    assert (notice.kind, result.release) == (kind, 0)


def test_the_table_has_a_row_for_each_family() -> None:
    candidate: Any = type("Candidate", (), {"number": 7})()
    text = Proposal(candidate, ChallengeResult(), EvaluateResult(), decision(GateVerdict.PROMOTED)).table()
    assert "| own: refund_payment | +12.5 | +4.0 to +21.0 | 48 | 0.0030 |" in text
    assert "| cancel | +12.5" in text
