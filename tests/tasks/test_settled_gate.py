"""A candidate that gains much and seems to lose a little: the stages play further tasks, and the gate promotes it.
What does fall is left to what answers it today, and the candidate is judged so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from db import ReleaseRow, ReleaseState, VerdictRow
from errors import EpisodesSpent
from models.scripted import NoopPolicy, OraclePolicy
from settings import load_settings
from tasks import evaluate as evaluate_file
from tasks import gate as gate_file
from tasks.evaluate import evaluate
from tasks.gate import gate, proposal_of
from tasks.gating import judging
from tasks.measuring.decisions import GateVerdict
from tasks.measuring.falls import FallKind
from tasks.measuring.lineup import BARE_BASE, Lineup, Trials
from tasks.releases import lifecycle
from tasks.round.context import Context
from tasks.round.drawing import RoundTasks
from tasks.round.results import ChallengeResult, EvaluateResult, RouteResult
from tasks.round.stage import forget, open_context

OWN, OTHER, STEADY = "refund_part", "cancel_other", ("item_price", "move_pending", "swap_delivered", "use_coupon")
CANDIDATE, SECOND = Lineup({"refund_payment": "an-adapter"}), Lineup({"refund_payment": "the same"})


@pytest.fixture
def context(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("TRACE_EVALUATION__OWN_TASKS", "10")
    monkeypatch.setenv("TRACE_EVALUATION__VALIDATION_TRIALS", "1")
    monkeypatch.setenv("TRACE_ROLLOUT__TASKS", "0")
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    row = ReleaseRow(
        id="candidate", target="shop", number=1, round_id=opened.round.id, base="b", base_revision="r",
        data_hash=opened.round.data_hash, members={}, router="first", router_path="", state=ReleaseState.CANDIDATE,
        evidence={},
    )  # fmt: skip
    opened.store.put([row])
    whole = [t for t in opened.tasks("validation") if t.family in (OWN, OTHER, *STEADY)]
    monkeypatch.setattr(Context, "tasks", lambda self, split: whole)
    results = {
        RouteResult: RouteResult(candidate="candidate", version="first"),
        ChallengeResult: ChallengeResult(passed=["refund_payment"], alpha=0.05, look=1),
    }
    monkeypatch.setattr(Context, "result", lambda self, kind, *of: results[kind])
    monkeypatch.setattr(judging, "families_of", lambda context, capability: [OWN])
    lineups = {"first": CANDIDATE, "second": SECOND}
    monkeypatch.setattr(evaluate_file, "lineup_of", lambda context, row: lineups[row.router] if row else BARE_BASE)
    monkeypatch.setattr(evaluate_file, "amend", lambda context, candidate, families: None)
    opened.__dict__["results"] = results
    yield opened
    forget(opened.round.id)


def played(
    monkeypatch: pytest.MonkeyPatch, lost: int, lost_later: int, families: Collection[str] = (OTHER,)
) -> list[str]:
    """Stands for two releases: the first fails the refunds alone, the candidate `lost` of the tasks of each of other
    families, and `lost_later` of their further ones. What was played, in order."""
    told: list[str] = []

    def play(context: Context, lineup: Lineup, owed: Trials, what: str) -> Any:
        told.append(what)
        tasks = owed.tasks
        if lineup is SECOND:  # leaves that family to the live release, which solves it
            failed = set[str]()
        elif lineup is CANDIDATE:
            mine = [[t.id for t in tasks if t.family == family] for family in families]
            failed = {i for ids in mine for i in ids[: lost_later if "settle" in what else lost]}
        else:
            failed = {t.id for t in tasks if t.family == OWN}
        ids = []
        for policy, part in ((OraclePolicy(), False), (NoopPolicy(), True)):
            some = [t for t in tasks if (t.id in failed) == part]
            episodes = replace(owed, tasks=some).episodes()
            ids += context.engine_of(policy).play(context.ground(owed.purpose), episodes, what)
        return SimpleNamespace(ids=ids)

    monkeypatch.setattr(evaluate_file, "play_lineup", play)
    return told


def evaluated(context: Context) -> EvaluateResult:
    found = evaluate.do(context)
    context.__dict__["results"][EvaluateResult] = found
    return found


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(
    ("lost_later", "kind", "verdict"),
    [
        (0, FallKind.HELD, GateVerdict.PROMOTED),
        (1, FallKind.WITHIN, GateVerdict.PROMOTED),
        (3, FallKind.UNCLEAR, GateVerdict.UNDERPOWERED),
        (8, FallKind.REGRESSION, GateVerdict.REGRESSION),
    ],
)
def test_two_tasks_lost_of_eight_are_settled_by_ten_more_or_the_same_again(
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    lost_later: int,
    kind: FallKind,
    verdict: GateVerdict,
    drawn: bool,
) -> None:
    monkeypatch.setattr(RoundTasks, "draws", lambda self, split: drawn)
    told = played(monkeypatch, 2, lost_later)
    found = evaluated(context)
    assert told[-2:] == ["what settles a fall (live)", "what settles a fall (routed)"]
    assert len(found.settled_live_ids) == len(found.settled_routed_ids) == (10 if drawn else 16)
    trials = {row.trial for row in context.store.trajectories(None, id=found.settled_live_ids)}
    assert trials == ({0} if drawn else {1, 2}), "what was played once is not counted again"
    proposal = proposal_of(context)
    assert proposal is not None
    assert proposal.decision.falls[OTHER].kind is kind
    assert proposal.decision.verdict is verdict
    assert proposal.decision.difference.tasks == 48, "the further episodes settle a fall and count for nothing else"


@pytest.mark.parametrize("lost", [2, 7])
def test_what_falls_is_left_to_what_answers_it_today(
    context: Context, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    asked: list[list[str]] = []

    def amended(context: Context, candidate: ReleaseRow, families: Collection[str]) -> ReleaseRow:
        assert candidate.router == "first"
        asked.append(list(families))
        second = replace(candidate, id="second", number=2, router="second")
        context.store.put([second])
        return second

    monkeypatch.setattr(evaluate_file, "amend", amended)
    played(monkeypatch, lost, 8)
    found = evaluated(context)
    assert asked == [[OTHER]]
    assert (found.candidate, list(found.left)) == ("second", [OTHER])
    proposal = proposal_of(context)
    assert proposal is not None
    assert proposal.candidate.id == "second"
    assert proposal.decision.verdict is GateVerdict.PROMOTED
    assert proposal.decision.families[OTHER].changed == 0
    (said,) = [r for r in proposal.decision.reasons if "as it was fitted first" in r]
    assert said.endswith("It is left to what answers it today.")
    assert f"{OTHER}: " in said
    for name in ("create_markdown_artifact", "promote", "tell_verdict"):
        monkeypatch.setattr(gate_file, name, lambda *_, **__: None)
    assert gate._work(context).release == 2
    first = context.store.row(ReleaseRow, id="candidate")
    assert first is not None
    assert (first.state, first.reason) == (
        ReleaseState.REFUSED,
        "its router was fitted again: release 2 has the verdict",
    )


def test_families_that_fall_together_by_a_task_each_are_left_too(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of forty tasks may be noise, and more than one blocks; playing more of each family would tell little."""
    asked: list[list[str]] = []
    second = context.store.row(ReleaseRow, id="candidate")
    assert second is not None
    second = replace(second, id="second", number=2, router="second")
    context.store.put([second])
    monkeypatch.setattr(evaluate_file, "amend", lambda context, first, left: asked.append(list(left)) or second)
    played(monkeypatch, 1, 0, (OTHER, "item_price"))
    found = evaluated(context)
    assert asked == [[OTHER, "item_price"]]
    assert found.settled_live_ids == []
    proposal = proposal_of(context)
    assert proposal is not None
    assert proposal.decision.verdict is GateVerdict.PROMOTED
    said = [r for r in proposal.decision.reasons if "as it was fitted first" in r]
    assert len(said) == 2
    assert all("all other families together: fell by" in reason for reason in said)


def test_nothing_is_left_where_the_own_families_gain_nothing_or_fall(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_file, "amend", lambda *given: pytest.fail("there is nothing to save"))
    played(monkeypatch, 7, 8)
    for own in ([OTHER], [OTHER, OWN], ["item_price"]):
        monkeypatch.setattr(judging, "families_of", lambda context, capability, own=own: own)
        assert evaluate._work(context).left == {}


def test_what_is_told_of_the_whole_is_the_splits_difference(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundTasks, "draws", lambda self, split: True)
    passed = ChallengeResult(passed=["refund_payment"], alpha=0.05, look=1, further={OWN: 10})
    context.__dict__["results"][ChallengeResult] = passed
    played(monkeypatch, 1, 0)
    found = evaluated(context)
    assert len(found.further_live_ids) == 10
    proposal = proposal_of(context)
    assert proposal is not None
    decision, live, routed = proposal.decision, found.live, found.routed
    assert live is not None
    assert routed is not None
    assert decision.own is not None
    assert (decision.difference.tasks, decision.own.tasks) == (48, 18)
    assert decision.difference.points == pytest.approx(100 * (routed.success - live.success))
    assert f"| the split | {decision.difference.points:+.1f} |" in proposal.table()


def test_nothing_is_played_where_nothing_is_unclear(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    for lost in (0, 1, 8):
        played(monkeypatch, lost, 0)
        found = evaluate._work(context)
        assert found.settled_live_ids == found.settled_routed_ids == []
        assert found.left == {}


def test_a_budget_that_ends_there_leaves_the_fall_unclear(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, 2, 0)
    plain = evaluate_file.play_lineup

    def spent(context: Context, *given: Any) -> Any:
        if "settle" in given[2]:
            raise EpisodesSpent("the budget of 5 episodes is spent")
        return plain(context, *given)

    monkeypatch.setattr(evaluate_file, "play_lineup", spent)
    assert evaluated(context).settled_live_ids == []
    proposal = proposal_of(context)
    assert proposal is not None
    assert proposal.decision.verdict is GateVerdict.UNDERPOWERED


def test_a_budget_that_does_not_pay_for_the_amended_candidate_leaves_the_first_ones_verdict(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = context.store.row(ReleaseRow, id="candidate")
    assert first is not None
    second = replace(first, id="second", number=2, router="second")
    monkeypatch.setattr(evaluate_file, "amend", lambda *given: second)
    played(monkeypatch, 7, 8)
    plain = evaluate_file.play_lineup

    def spent(context: Context, lineup: Lineup, *given: Any) -> Any:
        if lineup is SECOND:
            raise EpisodesSpent("the budget of 5 episodes is spent")
        return plain(context, lineup, *given)

    monkeypatch.setattr(evaluate_file, "play_lineup", spent)
    assert (evaluated(context).candidate, evaluated(context).left) == ("", {})
    proposal = proposal_of(context)
    assert proposal is not None
    assert (proposal.candidate.id, proposal.decision.verdict) == ("candidate", GateVerdict.REGRESSION)


@pytest.mark.parametrize(
    ("boundary", "verdict"),
    [
        ("environment", GateVerdict.UNDERPOWERED),
        ("provider", GateVerdict.UNDERPOWERED),
        ("policy", GateVerdict.PROMOTED),
    ],
)
def test_a_family_that_nobody_could_play_is_not_passed_over(
    context: Context, monkeypatch: pytest.MonkeyPatch, boundary: str, verdict: GateVerdict
) -> None:
    """Its service is down for both sides, and the candidate may fail there. Prompts that fit no context fit none later,
    either, and the live release has nothing to lose there."""
    played(monkeypatch, 0, 0)
    evaluated(context)
    nothing = "success = NULL, reward = NULL"
    lost = text(f"UPDATE trajectories SET error_boundary = :b, error = 'down', {nothing} WHERE family = :f")
    with context.store.transaction() as connection:
        connection.execute(lost, {"b": boundary, "f": OTHER})
    proposal = proposal_of(context)
    assert proposal is not None
    assert proposal.decision.verdict is verdict
    seen = proposal.decision.falls.get(OTHER)
    assert (seen and seen.kind) is (None if boundary == "policy" else FallKind.UNSEEN)
    assert proposal.decision.difference is not None
    assert proposal.decision.difference.left_out == (0 if boundary == "policy" else 8)


def test_a_round_whose_sides_finished_no_task_in_common_ends_with_a_verdict(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, 8, 8, (OTHER, *STEADY))  # so that the two share no episode
    found = evaluated(context)
    whole = {t.id for t in context.tasks("validation")[::2]}
    rows = context.store.trajectories(None, id=[*found.live_ids, *found.routed_ids])
    lost = [r.id for r in rows if (r.task_id in whole) == (r.id in found.live_ids)]
    with context.store.transaction() as connection:
        down = "UPDATE trajectories SET error_boundary = 'provider', error = 'down', success = NULL, reward = NULL"
        connection.execute(text(f"{down} WHERE id IN ({', '.join(map(repr, lost))})"))
    monkeypatch.setattr(gate_file, "create_markdown_artifact", lambda **_: None)
    told: list[str] = []
    monkeypatch.setattr(gate_file, "tell_verdict", lambda context, number, verdicts, why: told.append(why))
    assert gate._work(context).verdicts == {"release": "underpowered"}
    assert "finished no validation task in common, so nothing was compared" in told[0]
    proposal = proposal_of(context)
    assert proposal is not None
    assert "the split" not in proposal.table()


@pytest.fixture
def gain(context: Context, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A candidate that the rules promote, while nothing of MLflow is asked; what was told of the verdict."""
    said: list[Any] = []
    for name in ("heal", "_check_reachable_files", "publish"):
        monkeypatch.setattr(lifecycle, name, lambda *_: None)
    monkeypatch.setattr(gate_file, "create_markdown_artifact", lambda **given: None)
    monkeypatch.setattr(gate_file, "tell_verdict", lambda *given: said.append(given))
    played(monkeypatch, 0, 0)
    evaluated(context)
    return said


def verdict_of(context: Context, candidate: str = "candidate") -> tuple[str, str, str]:
    """What is stored of a candidate: verdict, its last reason, and the release's state."""
    row, release = context.store.row(VerdictRow, subject="release"), context.store.row(ReleaseRow, id=candidate)
    assert row is not None
    assert release is not None
    return row.verdict, row.reasons[-1], release.state


def test_a_persons_no_outlives_the_process_that_heard_it(
    context: Context, gain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*given: Any) -> None:
        raise KeyboardInterrupt

    no = ("declined", "A person declined it: not before Monday.", ReleaseState.REFUSED)
    context.declined = "not before Monday"
    monkeypatch.setattr(gate_file, "tell_verdict", dies)
    with pytest.raises(KeyboardInterrupt):
        gate.do(context)
    assert verdict_of(context) == no
    context.declined = ""  # of another process, in which nobody is asked of a candidate that is refused
    monkeypatch.setattr(gate_file, "tell_verdict", lambda *given: gain.append(given))
    assert gate.do(context).release == 0
    assert verdict_of(context) == no
    assert gain[-1][2]["release"] == "declined"


def test_what_was_rolled_back_meanwhile_is_a_refusal_with_the_reason(context: Context, gain: list[Any]) -> None:
    """The candidate was made from a release that a person has left: the round tells so, and goes on to its report."""
    row = context.store.row(ReleaseRow, id="candidate")
    assert row is not None
    parent = replace(row, id="parent", number=2, state=ReleaseState.ROLLED_BACK)
    context.store.put([parent, replace(row, id="child", number=3, parent_id="parent")])
    context.__dict__["results"][RouteResult] = RouteResult(candidate="child")
    found = gate.do(context)
    assert (found.release, found.promoted, found.verdicts["release"]) == (0, [], "declined")
    verdict, reason, state = verdict_of(context, "child")
    assert (verdict, state) == ("declined", ReleaseState.REFUSED)
    assert "It was not made live: release 3 of shop cannot follow the bare base" in reason
    assert gain[-1][3].endswith(reason)


def test_what_went_live_and_was_rolled_back_before_the_gate_ended_stays_so(context: Context, gain: list[Any]) -> None:
    context.store.set_state(ReleaseRow, "candidate", ReleaseState.LIVE)
    context.store.set_state(ReleaseRow, "candidate", ReleaseState.ROLLED_BACK)
    assert gate.do(context).release == 0
    verdict, reason, state = verdict_of(context)
    assert (verdict, state) == ("declined", ReleaseState.ROLLED_BACK)
    assert "It was not made live: release 1 of shop is rolled-back, not a candidate" in reason
