"""The history of a target: what each round and release changed, what it came to, and how practising ended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from stored_rounds import DATA, OTHER_DATA, Shop

from db import GatePlanRow, ReleaseState, RoundState, open_store
from db.values.types import utc_now
from tasks.releases.lookup import live_around
from tasks.reporting.before_after import before_after, data_before, history_until
from tasks.reporting.charts import history_chart
from tasks.reporting.figures import Ending, HistoryRow
from tasks.reporting.history import history_of, lineages
from tasks.reporting.nothing_trained import ending_of, how_it_ended
from tasks.round.results import (
    CalibrateResult,
    ContrastResult,
    GateResult,
    RegisterResult,
    ReportResult,
    RolloutResult,
    SelectResult,
    StageResult,
    TestResult,
    TrainResult,
)
from tasks.round.stored import StoredRound

MEASURED = {"mean_reward": 1.0, "success_rate": 1.0, "std_reward": 0.0, "all_success": 1.0, "all_zero": 0.0}
RATE = {"success": 0.7, "low": 0.6, "high": 0.8}
MEASURED |= {"informative": 0.0, "low": 0.9, "high": 1.0}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        yield Shop(store)


def test_the_history_tells_every_round_and_release_in_order(shop: Shop) -> None:
    first = shop.round()
    one = shop.release(1, {"a": "1", "b": "1"}, of=first, state=ReleaseState.RETIRED)
    shop.verdict(first, "a", "better")
    shop.verdict(first, "release", "promoted")
    shop.stage(first, GateResult(promoted=["a", "b"], release=1))
    shop.tested(first, base=0.4, live=0.4, routed=0.6, noop=0.1)
    shop.spent(first, 1.5)
    shop.done(first)

    shop.done(shop.round(one, profile="dry"), "dry run: nothing was played")

    refused = shop.round(one)
    shop.release(2, {"a": "2", "b": "1", "c": "1"}, one, refused, ReleaseState.REFUSED, reason="refund: fell.")
    shop.verdict(refused, "release", "rejected-regression", "refund: fell.")
    shop.stage(refused, GateResult(release=0))
    shop.tested(refused, base=0.4, live=0.6, routed=0.6)
    shop.done(refused)

    failed = shop.round(one)
    shop.done(failed, "EnvironmentFault: all episodes were lost", RoundState.FAILED)

    blend = shop.release(3, {"b": "9"}, one, state=ReleaseState.CANDIDATE, reason="blended by hand")

    later = shop.round(one, OTHER_DATA)
    shop.release(4, {"a": "2", "b": "1"}, one, later)
    shop.verdict(later, "release", "promoted")
    shop.stage(later, GateResult(promoted=["a"], release=4))
    shop.tested(later, base=0.3, live=0.5, routed=0.7)

    rows = {row.name: row for row in history_of(shop.store, "shop")}
    assert list(rows) == ["1", "3", "4", "r3", "5"]  # the dry one is no round
    assert (rows["1"].candidate, rows["1"].after, rows["1"].state) == (1, 1, "retired")
    assert (rows["1"].new, rows["1"].renewed, rows["1"].gone) == (["a", "b"], [], [])
    assert (rows["1"].verdict, rows["1"].verdicts, rows["1"].dollars) == ("promoted", {"a": "better"}, 1.5)
    test = rows["1"].test
    assert test is not None
    assert (test.success, test.low, test.high, test.tasks, test.n) == (0.6, 0.5, 0.7, 4, 8)
    assert rows["1"].base is not None
    assert rows["1"].base.success == 0.4

    assert (rows["3"].candidate, rows["3"].after, rows["3"].state) == (2, 1, "refused")
    assert (rows["3"].new, rows["3"].renewed) == (["c"], ["a"])
    assert (rows["3"].verdict, rows["3"].reason) == ("rejected-regression", "refund: fell.")
    assert rows["3"].change == "release 2 (refused): new: c; renewed: a"

    assert (rows["4"].verdict, rows["4"].after, rows["4"].test) == ("failed", None, None)
    assert rows["4"].change == "EnvironmentFault: all episodes were lost"

    assert blend.round_id is None
    assert (rows["r3"].round, rows["r3"].verdict, rows["r3"].gone) == (None, "no round", ["a"])
    assert rows["r3"].after is None  # it never was live

    assert rows["r3"].change == "release 3 (candidate): renewed: b; gone: a (blended by hand)"

    # Told while the round still runs: its last stage is the report.
    assert (rows["5"].verdict, rows["5"].after, rows["5"].renewed) == ("promoted", 4, ["a"])
    assert lineages(list(rows.values())) == [1, 1, 1, 1, 2]
    assert history_of(shop.store, "other") == []


@pytest.mark.parametrize("planned", [True, False])
def test_what_was_live_around_a_round_of_a_new_lineage_is_what_went_on_answering(shop: Shop, planned: bool) -> None:
    """Such a round begins from the bare base; the gate compares with the release that answers all the same."""
    one = shop.release(1, {"a": "1"})
    row = shop.round(data=OTHER_DATA)
    assert live_around(shop.store, [row]) == {row.id: (0, 0)}
    if planned:
        shop.store.put([GatePlanRow(round_id=row.id, sha256="s", rules={"against": one.number})])
    shop.stage(row, GateResult(skipped="no adapter was better"))
    live: Any = {"live": RATE, "routed": RATE}
    shop.stage(row, TestResult(release=one.number, looks=1, **live))
    shop.tested(row, base=0.1, live=0.4, routed=0.4)
    found = before_after(StoredRound(shop.store, row))
    assert found is not None
    assert (found.before, found.after, found.renewed) == (1, 1, {"a"})
    assert [told.after for told in history_of(shop.store, "shop") if told.round == row.number] == [1]


def test_the_figures_of_a_round_are_of_the_episodes_that_were_finished(shop: Shop) -> None:
    row = shop.round()
    played: Any = {"base": RATE | {"n": 7, "tasks": 4}, "live": RATE, "routed": RATE | {"n": 5, "tasks": 3}}
    shop.stage(row, TestResult(looks=1, **played))
    shop.tested(row, base=0.7, live=0.7, routed=0.7)
    (told,) = history_of(shop.store, "shop")
    assert told.test is not None
    assert told.base is not None
    assert (told.test.n, told.test.tasks, told.base.n, told.base.tasks) == (5, 3, 7, 4)


def test_what_a_round_of_a_new_lineage_made_live_took_the_place_of_what_was_live(shop: Shop) -> None:
    one = shop.release(1, {"a": "1"}, state=ReleaseState.RETIRED)
    row = shop.round(data=OTHER_DATA)
    shop.store.put([GatePlanRow(round_id=row.id, sha256="s", rules={"against": one.number})])
    shop.release(2, {"b": "2"}, of=row)
    shop.stage(row, GateResult(promoted=["b"], release=2))
    assert live_around(shop.store, [row]) == {row.id: (1, 2)}


def test_the_time_of_a_round_is_that_of_its_page_which_does_not_count_its_own_making(shop: Shop) -> None:
    row = shop.round()
    for name, seconds in (("rollout", 138.0), ("contrast", 3.0), (ReportResult.stage, 3.5)):
        stage = shop.store.stage(row.id, name)
        assert stage.claim()
        stage.finish({})
        with shop.store.transaction() as connection:
            connection.execute(text("UPDATE stages SET seconds = :s WHERE name = :n"), {"s": seconds, "n": name})
    (told,) = history_of(shop.store, "shop")
    assert told.seconds == 141.0


def test_a_rounds_own_history_ends_with_it_and_says_why_it_trained_nothing(shop: Shop) -> None:
    rounds = [shop.round(), shop.round(data=OTHER_DATA), shop.round(data=OTHER_DATA)]
    found = history_until(StoredRound(shop.store, rounds[1]), "nothing was lacking")
    assert [row.round for row in found] == [1, 2]
    assert [row.reason for row in found] == ["", "nothing was lacking"]
    assert data_before(found) == DATA
    assert data_before(history_until(StoredRound(shop.store, rounds[2]), "")) == ""
    assert data_before(found[:1]) == ""


def test_a_round_from_before_there_were_releases_is_told(shop: Shop) -> None:
    old = shop.round()
    shop.verdict(old, "a", "promoted")
    shop.stage(old, GateResult(promoted=["a"]))
    shop.tested(old, base=0.4, routed=0.6)
    shop.done(old)
    (row,) = history_of(shop.store, "shop")
    assert (row.verdict, row.after, row.candidate) == ("promoted", None, None)
    assert row.test is not None
    assert row.test.success == 0.6


@pytest.mark.parametrize("evidence", [{}, {"test": RATE}, {"test": {"base": {}, "routed": RATE}}])
def test_a_release_without_a_round_stands_where_its_evidence_says(shop: Shop, evidence: dict[str, Any]) -> None:
    shop.release(1, {"a": "1"}, evidence=evidence, live_at=utc_now())
    (row,) = history_of(shop.store, "shop")
    assert (row.name, row.after, row.new, row.state) == ("r1", 1, ["a"], "live")
    assert (row.test and row.test.success) == (0.7 if evidence else None)


def test_a_round_whose_results_cannot_be_read_is_told_by_its_state(shop: Shop) -> None:
    row = shop.round()
    shop.stage(row, GateResult(skipped="nothing to judge"))
    stage = shop.store.stage(row.id, "select")
    stage.claim()
    stage.finish({"form": "of another version"})
    shop.done(row)
    (told,) = history_of(shop.store, "shop")
    assert told.verdict == "done"
    assert "stored by another version" in told.reason


def test_lineages_grow_where_data_or_base_changed() -> None:
    rows = [HistoryRow(data_hash=h) for h in ("a", "a", "b", "", "b", "a")]
    assert lineages(rows) == [1, 1, 2, 2, 2, 3]
    assert lineages([]) == []
    bases = [HistoryRow(data_hash="a", base_model=b) for b in ("", "small", "small", "large", "", "large", "small")]
    assert lineages(bases) == [1, 1, 1, 2, 2, 2, 3]


def test_rounds_on_two_bases_are_not_joined(shop: Shop) -> None:
    for base, rate in (("small", 0.4), ("small", 0.5), ("large", 0.8)):
        row = shop.store.start_round("shop", DATA, 7, "laptop", {"base_model": base})
        shop.tested(row, base=rate, live=rate, routed=rate)
    rows = history_of(shop.store, "shop")
    assert lineages(rows) == [1, 1, 2]
    drawn = history_chart(rows, lineages(rows))
    assert drawn.count("<polyline") == 2  # of the two rounds on one base: the base's line, and that of what was live
    assert "the base model is another" in drawn


@pytest.mark.parametrize("before", [3, 60])
def test_the_first_round_on_other_data_is_seen_however_many_there_were_before(before: int) -> None:
    """Of more rounds than have a dot each there is a band, and one alone makes none."""
    rate: Any = {"test": RATE, "base": RATE}
    rows = [HistoryRow(round=n, data_hash="b" if n == before else "a", **rate) for n in range(before + 1)]
    drawn = history_chart(rows, lineages(rows))
    last = f'cx="{50 + (498 - 50) / len(rows) * (before + 0.5):.1f}"'
    assert len(re.findall(rf'<circle class="(?:base|routed)[a-z ]*" {last}', drawn)) == 2
    assert drawn.count('class="routed whisker"') == (1 if before == 60 else 4)


def ended(shop: Shop, *results: StageResult | tuple[StageResult, str], release: int = 0, success: float = 0.5) -> Any:
    """A stored round whose diagnosis went with `success`."""
    row = shop.round()
    shop.stage(row, RolloutResult(release=release, trajectories=[f"t{i}" for i in range(100)], lost=0, success=success))
    for result in results:
        shop.stage(row, *(result if isinstance(result, tuple) else (result,)))
    return StoredRound(shop.store, row)


def trained(ending: str = "steps", chosen: int = 3) -> TrainResult:
    return TrainResult(adapter="a", sha256="1", steps=chosen, run="r", ending=ending, chosen=chosen)


def calibrated(**changes: Any) -> CalibrateResult:
    return CalibrateResult(**(MEASURED | {"accepted": False, "reason": "too easy", "mastered": True} | changes))


@pytest.mark.parametrize(
    ("success", "kind", "words"),
    [
        (1.0, Ending.NOTHING_LACKING, "release 2 solved 100 of 100 diagnosis episodes. The round ends early and well."),
        (
            0.95,
            Ending.NOTHING_LACKING,
            "solved 95 of 100 diagnosis episodes (5.0 % failed; below 10.0 %, rho, nothing counts as lacking)",
        ),
        (0.9, Ending.NOTHING_TRAINED, "Release 2 solved 90 of 100 diagnosis episodes. None of 1 candidates passed"),
        (0.0, Ending.NOTHING_TRAINED, "Without any success there is nothing to contrast failures with"),
    ],
)
def test_nothing_lacking_is_not_nothing_trained(shop: Shop, success: float, kind: Ending, words: str) -> None:
    contrast = ContrastResult(analyst="checks", candidates=["a"], labels=1)
    stored = ended(shop, contrast, SelectResult(selected=[]), release=2, success=success)
    found = how_it_ended(stored, object(), False, 0.1)  # type: ignore[arg-type]
    assert found.kind == kind
    assert words in found.reason


def test_what_the_analysts_judges_call_unfit_is_lacking(shop: Shop) -> None:
    stored = ended(shop, SelectResult(selected=[], unfit={"a": "no tool for it"}), success=0.99)
    assert ending_of(stored, 0.1) == Ending.NOTHING_TRAINED


def test_mastered_is_a_good_ending_and_needs_all_of_them(shop: Shop) -> None:
    both = SelectResult(selected=["a", "b"])
    stored = ended(shop, both, (calibrated(), "a"), (calibrated(mastered=False, accepted=True), "b"),
                   (trained("mastered", 0), "b"), release=2)  # fmt: skip
    found = how_it_ended(stored, object(), True, 0.1)  # type: ignore[arg-type]
    assert found.kind == Ending.MASTERED
    assert found.reason.startswith("Mastered: release 2 solves the environments of what it seemed to lack (a, b)")
    one = ended(shop, both, (calibrated(), "a"), (calibrated(mastered=False), "b"))
    assert ending_of(one, 0.1) == Ending.NOTHING_TRAINED


def test_a_registered_adapter_means_trained(shop: Shop) -> None:
    done = RegisterResult(version="1", served_name="a@v1", base_success=0.1, adapter_success=0.9, liveness=0.1)
    stored = ended(shop, SelectResult(selected=["a"]), (calibrated(mastered=False, accepted=True), "a"),
                   (trained(), "a"), (done, "a"))  # fmt: skip
    assert how_it_ended(stored, object(), True, 0.1).kind == Ending.TRAINED  # type: ignore[arg-type]
    assert how_it_ended(stored, object(), True, 0.1).reason == ""  # type: ignore[arg-type]


def test_why_a_training_was_not_taken_is_said(shop: Shop) -> None:
    stored = ended(shop, SelectResult(selected=["a"]), (calibrated(mastered=False, accepted=True), "a"),
                   (trained("solved", 0).model_copy(update={"steps": 4}), "a"))  # fmt: skip
    reason = how_it_ended(stored, object(), True, 0.1).reason  # type: ignore[arg-type]
    assert "a: every checkpoint is worse on fresh seeds than what training began from." in reason
    assert ".." not in reason


def test_the_history_is_light_to_import() -> None:
    code = (
        "import sys, tasks.reporting.history, tasks.reporting.summary; "
        "print([m for m in ('torch', 'mlflow', 'prefect', 'transformers', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
