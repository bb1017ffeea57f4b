"""Figures of a round that came after others, or whose report was tried before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import text
from stored_rounds import Shop

from db import ReleaseRow, ReleaseState, Round, RouteRow, open_store
from environments.contract import Target
from models.objects import HomeFiles
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.reporting.collect import figures_of
from tasks.reporting.figures import Ending, RoundFigures
from tasks.reporting.headline import headline
from tasks.reporting.lookup import FIGURES, stored_figures
from tasks.reporting.nothing_trained import Ended
from tasks.reporting.page import render
from tasks.round.results import GateResult, ReportResult, RouteResult, SelectResult, TestResult
from tasks.round.stored import StoredRound


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        yield Shop(store)


def told(shop: Shop, row: Round, home: Path) -> RoundFigures:
    settings, target = load_settings(profile="smoke", home=home), cast(Target, object())
    ended = Ended(Ending.NOTHING_TRAINED, "No capability could be trained.")
    return figures_of(StoredRound(shop.store, row), settings, target, PolicyIdentity("tiny", "1"), ended)


@pytest.mark.parametrize("refused", [True, False])
def test_where_the_bare_base_answers_no_router_has_chosen(shop: Shop, settings_folder: Path, refused: bool) -> None:
    """A night whose candidate was refused, or one that trained nothing. Before it an earlier night's release left test
    tasks to the base, with whose episodes these decisions are stored, and was rolled back."""
    base = shop.episodes(shop.round(), "base", [(False, False), (True, True)])
    shop.store.put([RouteRow(trajectory_id=i, router_version="r1", capability="") for i in base[:2]])
    row = shop.round()
    if refused:
        candidate = shop.release(2, {"set_address": "2"}, None, row, ReleaseState.REFUSED, router="r2")
        shop.stage(row, RouteResult(candidate=candidate.id, threshold=0.6, calibration=20, right=0.95, mode="both"))
    shop.stage(row, GateResult(release=0))
    rate: Any = {"success": 0.5, "low": 0.0, "high": 1.0}
    ids: Any = dict.fromkeys(("base_ids", "live_ids", "routed_ids"), base)
    shop.stage(row, TestResult(**ids, noop_ids=[], release=0, looks=2, live=rate, routed=rate))
    found = told(shop, row, settings_folder / "home")
    said = "No router chose on the test split: the bare base answers." if refused else "No router was built. No capab"
    assert said in render(found)
    assert (found.router and found.router.right) == (0.95 if refused else None)


def test_a_report_that_broke_off_before_counts_in_no_time_of_the_round(shop: Shop, settings_folder: Path) -> None:
    """As MLflow's absence may have it: the page's total is that of its row in the table of rounds."""
    row = shop.round()
    for name in ("rollout", ReportResult.stage):
        stage = shop.store.stage(row.id, name)
        assert stage.claim()
        stage.fail("StoreError: MLflow does not answer")
    with shop.store.transaction() as connection:
        connection.execute(text("UPDATE stages SET seconds = 138.0"))
    found = told(shop, row, settings_folder / "home")
    assert found.seconds == {"total": 138.0, "rollout": 138.0}
    assert found.work["orchestration"] == found.history[-1].seconds == 138.0


def test_what_workers_do_at_once_takes_no_longer_than_their_stage(shop: Shop, settings_folder: Path) -> None:
    """Eight workers of a cluster, each of which says what it spent: in all more than the stage took."""
    row = shop.round()
    shop.stage(row, RouteResult(earlier_seconds=20.0, model_seconds=600.0, environment_seconds=200.0))
    shop.stage(row, SelectResult(selected=[], earlier_seconds=120.004))  # seconds are stored to other digits
    shop.stage(row, GateResult(model_seconds=30.0, environment_seconds=10.0))
    with shop.store.transaction() as connection:
        connection.execute(text("UPDATE stages SET seconds = 120.0"))
    found = told(shop, row, settings_folder / "home")
    assert found.work == {"model": 105.0, "environment": 35.0, "earlier": 140.0, "orchestration": 80.0}
    assert "1 min 20 s in everything else" in render(found)


def test_what_is_told_of_an_old_night_says_what_has_become_of_its_release(shop: Shop, settings_folder: Path) -> None:
    row = shop.round()
    one = shop.release(1, {"set_address": "1"}, None, row)
    shop.verdict(row, "release", "promoted")
    shop.stage(row, GateResult(promoted=["set_address"], release=1))
    (settings_folder / row.id).mkdir()
    figures = told(shop, row, settings_folder)
    (settings_folder / row.id / FIGURES).write_text(figures.model_dump_json())
    files = HomeFiles(settings_folder)
    assert stored_figures(shop.store, row, files) == figures
    assert headline(figures).startswith("Release 1 is live, and was not played")
    shop.store.set_state(ReleaseRow, one.id, ReleaseState.RETIRED)
    now = stored_figures(shop.store, row, files)
    assert headline(now).startswith("Release 1 became live and has been replaced since")
    release = now.release
    assert release is not None
    kept = now.model_copy(update={"release": release.model_copy(update={"state": "live"})})
    assert kept == figures
