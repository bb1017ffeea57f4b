"""Rounds that were stopped and that the settings of today do not go on with: told at once, and given up in the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flows.improve as flow
from db import Round, RoundState, Store, open_store
from db.values.types import utc_now
from settings import Settings, load_settings
from tasks.housekeeping.retention import give_up
from tasks.housekeeping.stored_checks import leases
from tasks.operations import announcements
from tasks.operations.announcements import tell_start
from tasks.unattended.left_behind import left_behind


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(home=settings_folder, target="shop")


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with open_store(settings.database_url) as opened:
        yield opened


def stopped(store: Store, days: float, target: str = "shop", **config: Any) -> Round:
    """A round that began so many days ago, and was stopped an hour later."""
    row = store.finish_round(store.start_round(target, "d", 0, "night", config).id, RoundState.INTERRUPTED, "budget")
    began = (utc_now() - timedelta(days=days)).strftime("%Y-%m-%d %H:%M:%S.%f")
    with store.transaction() as connection:
        connection.exec_driver_sql(f"UPDATE rounds SET started_at = '{began}', seconds = 3600 WHERE id = '{row.id}'")
    return row


def done(store: Store, target: str = "shop", profile: str = "night") -> Round:
    return store.finish_round(store.start_round(target, "d", 0, profile, {"now": 1}).id, RoundState.DONE)


def test_what_later_rounds_left_behind_is_told_and_given_up(store: Store, settings: Settings) -> None:
    before, young, held = stopped(store, 40), stopped(store, 10), stopped(store, 40, a=1)
    elsewhere = stopped(store, 40, "desk")
    done(store, "desk", "dry")  # plays nothing, and says nothing of what is wanted
    assert left_behind(store) == [], "nothing came to its end since: the next run may go on with each"
    last = done(store)
    open_one = store.open_round("shop", 0, "night", {"a": 1})
    assert open_one is not None
    presence = store.presence(open_one.id, 3600.0)
    presence.beat()
    assert [one.round.number for one in left_behind(store)] == [before.number, young.number]
    told = [f.said for f in leases(store)]
    assert len(told) == 2
    assert f"round {before.number} of shop was stopped at " in told[0]
    assert f", and round {last.number} has ended since: nobody goes on with it" in told[0]

    (line,) = give_up(settings, 30, dry_run=True)
    assert line.endswith("it would be given up")
    assert store.round(before.id).state == RoundState.INTERRUPTED
    assert len(give_up(settings, 30, dry_run=False)) == 1
    row = store.round(before.id)
    assert (row.state, row.reason.partition(":")[0]) == (RoundState.CANCELLED, "given up")
    assert {store.round(r.id).state for r in (young, elsewhere)} == {RoundState.INTERRUPTED}
    assert store.round(held.id).state == RoundState.RUNNING
    assert give_up(settings, 30, dry_run=False) == []


def test_a_stage_of_a_round_that_has_ended_is_owed_nothing(store: Store) -> None:
    """The process died, and the round was closed since, as another release had become live."""
    row = store.start_round("shop", "d", 0, "night", {})
    assert store.stage(row.id, "train:refund").claim("a-machine:1", lease_seconds=1e-6)
    (left,) = leases(store)
    assert "stage train:refund of round 1 was left by a-machine:1" in left.said
    store.finish_round(row.id, RoundState.FAILED, "another release of shop became live since it began")
    assert [f.level for f in leases(store)] == ["ok"]


def test_a_round_with_other_settings_says_what_it_does_not_go_on_with(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: texts.append(notice.text))

    def begin(fresh: bool = False, **given: Any) -> None:
        settings = load_settings(profile="smoke", home=settings_folder / "home", **given)
        with caplog.at_level(logging.WARNING, "trace"), flow.opened(settings, fresh) as context:
            tell_start(context)
            context.store.finish_round(context.round.id, RoundState.INTERRUPTED, "stopped")

    said = "round 1 was stopped and is not gone on with: it was begun with other settings (seed, train.rank)"
    begin()
    begin()
    assert not caplog.messages
    begin(seed=7, train={"rank": 2})
    assert said in caplog.messages
    assert texts == ["round 1 on shop began"] * 2 + [f"round 2 on shop began; {said}"]
    begin(fresh=True, seed=7, train={"rank": 2})
    assert texts[-1] == "round 3 on shop began", "who asks for a fresh one knows"
