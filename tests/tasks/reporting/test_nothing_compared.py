"""The report of a round whose two sides finished no test task in common: it says so, and is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from stored_rounds import Shop

from db import ReleaseState, open_store
from environments.contract import Target
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.reporting.collect import figures_of
from tasks.reporting.figures import Ending
from tasks.reporting.headline import headline
from tasks.reporting.nothing_trained import Ended
from tasks.reporting.page import render
from tasks.round.results import TestResult
from tasks.round.stored import StoredRound


@pytest.mark.parametrize("promoted", [False, True])
def test_a_round_that_compared_nothing_on_test_has_its_report(
    tmp_path: Path, settings_folder: Path, promoted: bool
) -> None:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        shop = Shop(store)
        row = shop.round()
        base = shop.episodes(row, "base", [(True,), (True,), (False,), (False,)])
        routed = shop.episodes(row, "two", [(True,), (True,), (True,), (True,)])
        with store.transaction() as connection:
            for i in [*base[:2], *routed[2:]]:
                lost = "UPDATE trajectories SET error_boundary = 'policy', error = 'too long', success = NULL"
                connection.execute(text(f"{lost}, reward = NULL WHERE id = :i"), {"i": i})
        if promoted:
            shop.release(1, {"set_address": "2"}, of=row, state=ReleaseState.LIVE)
            shop.verdict(row, "release", "promoted", "As a whole: +25.0 points.")
        rate: dict[str, Any] = {"success": 0.5, "low": 0.0, "high": 1.0}
        result = TestResult(base_ids=base, live_ids=base, routed_ids=routed, noop_ids=[], live=rate, routed=rate)
        shop.stage(row, result)
        settings = load_settings(profile="smoke", home=settings_folder / "home")
        target: Target = Any  # type: ignore[assignment]  # only asked whether it has generators
        stored, ended = StoredRound(store, row), Ended(Ending.TRAINED)
        figures = figures_of(stored, settings, target, PolicyIdentity("tiny", "1"), ended)
        assert (figures.difference, figures.gain) == (None, None)
        assert figures.base is not None
        assert figures.routed is not None
        said = "base and routed finished no test task in common, so they were not compared"
        assert figures.warnings[0].startswith(said)
        assert said in render(figures)
        if promoted:
            assert "On the test split nothing was compared" in headline(figures)
