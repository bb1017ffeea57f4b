"""The first release of a lineage has no parent: what it may replace; what a rollback leads to, and what it passes."""

from __future__ import annotations

import pytest

from db import GatePlanRow, ReleaseState
from errors import ConfigurationError
from tasks.releases.lifecycle import barred, promote, rollback
from tests.tasks.releases.release_homes import Home


@pytest.mark.parametrize("meanwhile", ["an earlier one", "the bare base", "another lineage"])
def test_a_new_lineage_goes_live_only_in_place_of_what_it_was_compared_with(home: Home, meanwhile: str) -> None:
    """It has no parent that would say what that was; the plan of its round does."""
    for _ in range(2):
        home.promoted({"refund": home.member("refund")})
    round_ = home.store.start_round(home.target, "data-2", 1, "laptop", {})
    home.store.put([GatePlanRow(round_id=round_.id, sha256="plan", rules={"against": 2})])
    row = home.candidate({"cancel": home.member("cancel")}, parent=None, data_hash="data-2", round_id=round_.id)
    if meanwhile == "another lineage":
        home.promoted({"cancel": home.member("cancel")}, parent=None, data_hash="data-3")
    else:
        rollback(home.store, home.registry, home.target, to=0 if meanwhile == "the bare base" else None)
    now = {"an earlier one": "release 1", "another lineage": "release 4"}.get(meanwhile, meanwhile)
    before = home.states()
    with pytest.raises(ConfigurationError, match=f"was compared with release 2, and {now} answers now; run another"):
        promote(home.store, home.registry, row.id, "better")
    assert home.states() == before
    home.check()
    assert promote(home.store, home.registry, row.id, "by me", by_hand=True).state == ReleaseState.LIVE
    home.check()


def test_a_new_lineage_is_left_for_the_release_that_it_replaced(home: Home) -> None:
    for _ in range(2):
        home.promoted({"refund": home.member("refund")})
    round_ = home.store.start_round(home.target, "data-2", 1, "laptop", {})
    home.store.put([GatePlanRow(round_id=round_.id, sha256="plan", rules={"against": 2})])
    home.promoted({"cancel": home.member("cancel")}, parent=None, data_hash="data-2", round_id=round_.id)
    home.promoted({"cancel": home.member("cancel")}, data_hash="data-2")
    for left, back in ((4, 3), (3, 2), (2, 1)):
        assert rollback(home.store, home.registry, home.target).number == back  # type: ignore[union-attr]
        assert (home.states()[left], home.states()[back]) == ("rolled-back", "live")
        home.check()
    assert rollback(home.store, home.registry, home.target) is None, "nothing was live before the first"


def test_a_new_lineage_is_not_left_for_what_was_rolled_back(home: Home) -> None:
    home.promoted({"refund": home.member("refund")})
    rollback(home.store, home.registry, home.target)
    home.promoted({"cancel": home.member("cancel")}, data_hash="data-2")
    assert rollback(home.store, home.registry, home.target) is None
    home.check()


def test_a_rollback_passes_an_ancestor_over_that_holds_a_barred_adapter(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """From there no round could go on: every candidate that inherits the adapter is refused."""
    good, bad = home.member("refund"), home.member("cancel")
    home.promoted({"refund": good})
    home.promoted({"refund": good, "cancel": bad})
    waiting = home.candidate({"refund": good, "exchange": home.member("exchange")})
    home.promoted({"refund": good, "cancel": bad, "track": home.member("track")})
    rollback(home.store, home.registry, home.target, to=1)
    promote(home.store, home.registry, waiting.id, "by me", by_hand=True)
    assert home.states() == {1: "retired", 2: "retired", 3: "live", 4: "rolled-back"}
    assert bad["sha256"] in barred(home.store, home.target)
    assert rollback(home.store, home.registry, home.target).number == 1  # type: ignore[union-attr]
    assert f"release 2 of {home.target} is passed over: cancel@v1-{bad['sha256'][:8]} is barred" in caplog.text
    assert "trace-agent rollback --to 2" in caplog.text
    home.check()
    next_night = home.candidate({"refund": good, "exchange": home.member("exchange")})
    assert promote(home.store, home.registry, next_night.id, "better").state == ReleaseState.LIVE
    # Who names it in `to` allows it.
    assert rollback(home.store, home.registry, home.target, to=2).number == 2  # type: ignore[union-attr]
    assert bad["sha256"] not in barred(home.store, home.target)
    home.check()


def test_a_new_lineage_is_not_left_for_what_holds_a_barred_adapter(home: Home) -> None:
    bad, other = home.member("refund"), home.member("cancel")
    home.promoted({"refund": bad})
    home.promoted({"cancel": other}, parent=None, data_hash="data-2")
    home.promoted({"cancel": other, "refund": bad}, data_hash="data-2")
    assert rollback(home.store, home.registry, home.target).number == 2  # type: ignore[union-attr]
    assert set(barred(home.store, home.target)) == {bad["sha256"]}
    assert rollback(home.store, home.registry, home.target) is None
    assert home.states() == {1: "retired", 2: "rolled-back", 3: "rolled-back"}
    home.check()
