"""A process that finds a stage held plays episodes of it, for as long as there are some to share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from db import Stage
from errors import StageHeld
from settings import load_settings
from tasks.round import stage as stages
from tasks.round.context import Context
from tasks.round.results import SelectResult
from tasks.round.stage import forget, open_context, stage

AHEAD = "'2099-01-01 00:00:00.000000'"


@stage("select")
def selected(context: Context) -> SelectResult:
    raise AssertionError("it is done by the process that holds it")


class Helping:
    """Stands for the sharing of a round: helps `times`, and then has the stage done by its holder."""

    def __init__(self, times: int, holder: Stage) -> None:
        self.left, self.holder = times, holder

    def play(self, *_: Any) -> None:
        return None

    def help(self) -> bool:
        self.left -= 1
        if self.left < 0:
            return False
        if self.left == 0:
            self.holder.finish(SelectResult(selected=["refund"]).model_dump(mode="json"))
        return True


@pytest.fixture
def context(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(stages, "POLL_SECONDS", 0.0)
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
    yield opened
    forget(opened.round.id)


def test_it_helps_until_the_stage_is_done_and_takes_its_result(context: Context) -> None:
    holder = context.store.stage(context.round.id, "select")
    assert holder.claim(lease_seconds=600)
    helping = Helping(50, holder)  # longer than anyone would wait
    context.sharing = helping
    assert selected.do(context).selected == ["refund"]
    assert helping.left == 0


def test_where_there_is_nothing_to_share_it_says_who_holds_the_stage(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = context.store.stage(context.round.id, "select")
    assert holder.claim("someone", lease_seconds=600)
    context.sharing = Helping(0, holder)
    monkeypatch.setattr(stages, "LEASE_SECONDS", 0.001)  # the second look is the last
    monkeypatch.setattr(stages, "POLL_SECONDS", 0.01)
    with pytest.raises(StageHeld, match="held by someone, which is alive"):
        selected.do(context)


def test_who_holds_the_stage_is_said_once_and_again_when_it_is_another(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    class Looking(Helping):
        """Has nothing to share, and lets the stage go from one to another, who does it in the end."""

        def help(self) -> bool:
            self.left -= 1
            if self.left == 5:
                self.holder.fail("stopped")
                assert self.holder.claim("another", lease_seconds=600)
            elif self.left == 0:
                self.holder.finish(SelectResult(selected=["refund"]).model_dump(mode="json"))
            return False

    caplog.set_level(logging.INFO, "trace")
    holder = context.store.stage(context.round.id, "select")
    assert holder.claim("someone", lease_seconds=600)
    context.sharing = Looking(10, holder)
    assert selected.do(context).selected == ["refund"]
    waits = "stage select is held by {}; waiting for it, or for its lease"
    said = [line for line in caplog.messages if "waiting" in line]
    assert said == [waits.format("someone"), waits.format("another")]


@pytest.mark.parametrize(("at", "ended", "taken"), [(AHEAD, True, True), (AHEAD, False, False), (None, True, False)])
def test_a_lease_of_a_clock_that_was_ahead_ends_with_its_process(
    context: Context, monkeypatch: pytest.MonkeyPatch, at: str | None, ended: bool, taken: bool
) -> None:
    """Once the clock is right it would run out in years. Any other lease is waited for: it runs out by itself."""
    monkeypatch.setattr(stages, "has_ended", lambda owner: ended and owner == "holder")
    monkeypatch.setattr(stages, "LEASE_SECONDS", 1e-9)
    monkeypatch.setattr(stages, "POLL_SECONDS", 1e-6)
    holder = context.store.stage(context.round.id, "select")
    assert holder.claim("holder", lease_seconds=600)
    if at is not None:
        with context.store.transaction() as connection:
            connection.execute(text(f"UPDATE stages SET heartbeat_at = {at}, lease_until = {at}"))
    with pytest.raises(AssertionError if taken else StageHeld):
        selected.do(context)
    assert holder.heartbeat() is not taken
