"""What is told of a round's beginning and of its end, through the flow's own door."""

from __future__ import annotations

from pathlib import Path

import pytest

import flows.improve as flow
from db import RoundState, Store
from errors import BudgetExceeded, NotApproved, ProviderError, StoreError, TargetBusy, TrainingError
from settings import Settings, load_settings
from tasks.operations import announcements
from tasks.operations.announcements import tell_start
from tasks.unattended.notices import Notice


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Notice]:
    given: list[Notice] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: given.append(notice))
    return given


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(profile="smoke", home=settings_folder / "home")


def stop(settings: Settings, problem: BaseException) -> None:
    with pytest.raises(type(problem)), flow.opened(settings, fresh=False):
        raise problem


def test_a_round_that_begins(settings: Settings, said: list[Notice]) -> None:
    with flow.opened(settings, fresh=False) as context:
        tell_start(context)
    assert [(n.kind, n.text) for n in said] == [("started", "round 1 on shop began")]
    assert said[0].details == {"round": 1, "round_id": context.round.id, "live": 0, "profile": "smoke"}


def test_a_hang_is_told_once_by_the_run_that_goes_on(settings: Settings, said: list[Notice]) -> None:
    with flow.opened(settings, fresh=False) as context:
        pass
    (context.folder / "hung.machine.7.0a.txt").write_text("Thread 0x1 (most recent call first):")
    for _ in range(2):
        with flow.opened(settings, fresh=False) as context:
            tell_start(context)
            (watched,) = context.folder.glob("hung.*")
            context.store.finish_round(context.round.id, RoundState.INTERRUPTED)
        assert not watched.exists()
    assert [n.kind for n in said] == ["hung", "started", "started"]
    assert "no progress for 60 minutes" in said[0].text


def test_a_death_is_told_once_by_the_run_that_goes_on(settings: Settings, said: list[Notice]) -> None:
    with flow.opened(settings, fresh=False):
        pass  # the process ends here: nobody says how the round ended
    for _ in range(2):
        with flow.opened(settings, fresh=False) as context:
            tell_start(context)
            context.store.finish_round(context.round.id, RoundState.INTERRUPTED)
    assert [n.kind for n in said] == ["died", "started", "started"]
    assert "round 1 on shop ended without a word" in said[0].text


DEATHS = {"id-1": "green-griffin (no heartbeat for 75 s)", "id-2": "red-griffin (no word of why)"}


@pytest.fixture
def scheduled(settings: Settings, said: list[Notice], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a deployment after two that Prefect saw die; it comes as far as its round's first stage."""
    monkeypatch.setattr(flow, "deaths_before", lambda target: dict(DEATHS))
    monkeypatch.setattr(flow, "preflight", lambda settings: None)

    def stages(context: object, last: str) -> None:
        raise BudgetExceeded("limits.hours = 2 is reached")

    monkeypatch.setattr(flow, "stages", stages)


def run(settings: Settings) -> None:
    with pytest.raises((BudgetExceeded, StoreError)):
        flow.improve.fn(flow.ImproveParameters(profile="smoke", home=settings.folder))


def test_a_death_that_prefect_knew_of_is_told_once(settings: Settings, said: list[Notice], scheduled: None) -> None:
    with flow.opened(settings, fresh=False):
        pass  # the process ends here
    run(settings)
    assert [n.kind for n in said] == ["died", "started", "budget-reached"]
    assert "the 2 runs before this one on shop died: green-griffin (no heartbeat for 75 s); red-griff" in said[0].text
    assert said[0].details == {"runs": ["id-1", "id-2"]}


def test_a_hang_that_prefect_knew_of_as_a_death_is_told_once(
    settings: Settings, said: list[Notice], scheduled: None
) -> None:
    with flow.opened(settings, fresh=False) as context:
        pass
    (context.folder / "hung.machine.7.0a.txt").write_text("Thread 0x1 (most recent call first):")
    run(settings)
    assert [n.kind for n in said] == ["hung", "started", "budget-reached"]
    assert "no progress for 60 minutes" in said[0].text
    assert "red-griffin (no word of why)" in said[0].text
    assert said[0].details == {"round": 1, "round_id": context.round.id, "runs": ["id-1", "id-2"]}


def test_deaths_are_told_by_a_run_that_has_no_round_either(
    settings: Settings, said: list[Notice], scheduled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(settings: Settings) -> None:
        raise StoreError("the database does not answer")

    monkeypatch.setattr(flow, "preflight", away)
    run(settings)
    assert [(n.kind, n.details) for n in said] == [("died", {"runs": ["id-1", "id-2"]})]


def refused(settings: Settings, problem: Exception, scheduled: bool) -> None:
    with pytest.raises(type(problem)), announcements.failure_announced(settings, scheduled):
        raise problem


def test_a_scheduled_run_that_has_no_round_is_told(settings: Settings, said: list[Notice]) -> None:
    refused(settings, StoreError("database 'x' does not answer"), scheduled=True)
    refused(settings, OSError("/home/somebody: password=123"), scheduled=True)
    assert {n.kind for n in said} == {"failed"}
    assert "ended before it had a round: database 'x' does not answer (the next run tries again)" in said[0].text
    assert "a OSError" in said[1].text
    assert "password" not in said[1].text


def test_who_starts_it_by_hand_or_finds_another_run_is_told_nothing(settings: Settings, said: list[Notice]) -> None:
    refused(settings, StoreError("down"), scheduled=False)
    refused(settings, TargetBusy("another run works on shop"), scheduled=True)
    assert said == []


def test_a_store_that_is_gone_does_not_hide_why(
    settings: Settings, said: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database went away amid a round: that it cannot be stored must not keep it from being told."""

    def gone(*given: object, **named: object) -> None:
        raise StoreError("it is still down")

    monkeypatch.setattr(Store, "finish_round", gone)
    stop(settings, StoreError("connection lost"))
    (notice,) = said
    assert (notice.kind, "was stopped: connection lost" in notice.text) == ("failed", True)


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        (BudgetExceeded("limits.hours = 2 is reached"), "budget-reached", "limits.hours = 2 is reached (the next run"),
        (ProviderError("busy", transient=True), "failed", "was stopped: busy (the next run goes on with it)"),
        (TrainingError("no group"), "failed", "was stopped: no group (the next run begins another round)"),
        (OSError("/home/somebody: password=123"), "failed", "was stopped: a OSError (the next run goes on with it)"),
    ],
)
def test_how_a_round_was_stopped(
    settings: Settings, said: list[Notice], problem: Exception, kind: str, words: str
) -> None:
    stop(settings, problem)
    (notice,) = said
    assert notice.kind == kind
    assert words in notice.text


def test_who_stops_it_by_hand_knows(settings: Settings, said: list[Notice]) -> None:
    stop(settings, KeyboardInterrupt())
    assert said == []


@pytest.mark.parametrize("problem", [BudgetExceeded("reached"), NotApproved("nobody answered")])
def test_what_waits_for_a_person_is_gone_on_with_however_often(
    settings: Settings, said: list[Notice], problem: Exception
) -> None:
    for _ in range(3):
        stop(settings, problem)
    with flow.opened(settings, fresh=False) as context:
        assert context.round.number == 1
