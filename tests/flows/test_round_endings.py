"""How a round ends that met an error: gone on with, or closed so that a schedule begins the next one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Abort, Pause, TerminationSignal
from sqlalchemy import text

import flows.improve as flow
from db import Round, RoundState, Store, open_store
from db.rows import PROCESS
from errors import (
    AdapterError,
    BudgetExceeded,
    EnvironmentFault,
    EpisodesLost,
    ProviderError,
    SandboxError,
    ServersBusy,
    StageHeld,
    StoreError,
    TrainingError,
)
from models.providers.litellm_client import CallFailed
from settings import Settings, load_settings
from tasks.operations import announcements
from tasks.round import stage as stage_file
from tasks.round.context import Context
from tasks.round.results import SelectResult
from tasks.select import select


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(profile="smoke", home=settings_folder / "home")


def states(settings: Settings, *problems: BaseException) -> list[str]:
    """States of all rounds after runs that met these errors."""
    for problem in problems:
        with pytest.raises(type(problem)), flow.opened(settings, fresh=False):
            raise problem
    store: Store
    with open_store(settings.database_url) as store:
        return [r.state for r in sorted(store.rows(Round), key=lambda r: r.number)]


@pytest.mark.parametrize("problem", [TrainingError("no group"), EnvironmentFault("all lost"), AdapterError("changed")])
def test_what_would_come_again_closes_the_round_and_the_next_run_begins_the_next(
    settings: Settings, problem: Exception
) -> None:
    assert states(settings, problem) == [RoundState.FAILED]
    with flow.opened(settings, fresh=False) as context:
        assert context.round.number == 2


@pytest.mark.parametrize(
    "problem",
    [
        ProviderError("busy", transient=True),
        EpisodesLost("40 of 48"),
        SandboxError("died"),
        BudgetExceeded("cap"),
        OSError("disk full"),
    ],
)
def test_what_may_pass_leaves_the_round_to_be_gone_on_with(settings: Settings, problem: Exception) -> None:
    assert states(settings, problem) == [RoundState.INTERRUPTED]
    with flow.opened(settings, fresh=False) as context:
        assert context.round.number == 1


def test_the_very_same_error_twice_closes_the_round(settings: Settings) -> None:
    assert states(settings, OSError("disk full"), OSError("no network")) == [RoundState.INTERRUPTED]
    assert states(settings, OSError("no network")) == [RoundState.FAILED]
    assert states(settings, OSError("no network")) == [RoundState.FAILED, RoundState.INTERRUPTED]
    assert states(settings, EpisodesLost("40 of 48"), EpisodesLost("40 of 48"))[1:] == [RoundState.FAILED]


def test_a_round_whose_servers_sleep_for_another_training_waits_for_that_however_often(settings: Settings) -> None:
    assert states(settings, *[ServersBusy("round 7 on other trains")] * 3) == [RoundState.INTERRUPTED]


def test_a_round_whose_language_model_is_not_paid_waits_for_that_however_often(settings: Settings) -> None:
    unpaid = CallFailed("m failed (402): no credits", "no credits", 402, transient=False)
    assert states(settings, *[unpaid] * 3) == [RoundState.INTERRUPTED]


def test_a_round_that_was_stopped_by_the_user_is_gone_on_with(settings: Settings) -> None:
    assert states(settings, KeyboardInterrupt(), KeyboardInterrupt()) == [RoundState.INTERRUPTED]


HELD = StageHeld("stage 'challenge' is held by elsewhere:1:ab, which is alive")


def test_a_second_process_leaves_the_round_to_the_one_that_works_on_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it ends: the first one would find its round closed, and people would be told of an end that is none."""
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: pytest.fail(notice.text))
    monkeypatch.setattr(flow, "stages", lambda context, last: iter(()))
    monkeypatch.setattr(flow, "check_training", lambda settings: None)
    with flow.opened(settings, fresh=False) as first:
        stage = first.store.stage(first.round.id, "challenge")
        assert stage.claim("elsewhere:1:ab", lease_seconds=600)
        assert states(settings, HELD, HELD, OSError("disk full"), KeyboardInterrupt()) == [RoundState.RUNNING]
        given = flow.ImproveParameters(profile="smoke", home=settings.home)
        assert flow.until.fn("select", given) == {"round": first.round.id}
        assert first.store.round(first.round.id).state == RoundState.RUNNING
        with flow.opened(settings, fresh=False) as second:
            assert not second.left, "nobody died"
        stage.skip("none")
        assert states(settings, HELD) == [RoundState.RUNNING], "the first one may be between two stages"
        # A process of an earlier version, or one that looked between two stages, says that the round was interrupted.
        first.store.finish_round(first.round.id, RoundState.INTERRUPTED, "stopped")
        first.store.finish_round(first.round.id, RoundState.DONE)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_process_that_was_suspended_past_its_lease_leaves_the_round_to_whoever_took_over(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """It wakes at the end of its stage, while the other one works on, or has ended the round."""
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: pytest.fail(notice.text))

    def suspended(context: Context) -> SelectResult:
        row = context.store.stage(context.round.id, "select")
        with context.store.transaction() as connection:
            connection.execute(text("UPDATE stages SET lease_until = '2020-01-01' WHERE name = 'select'"))
        assert row.claim("elsewhere:1:ab", lease_seconds=600)
        if not goes_on:
            row.finish({"selected": ["theirs"]})
            context.store.finish_round(context.round.id, RoundState.DONE, "nothing was lacking")
        return SelectResult(selected=["ours"])

    monkeypatch.setattr(select, "_work", suspended)
    with pytest.raises(StageHeld, match="'select' was taken over"), flow.opened(settings, fresh=False) as context:
        select.do(context)
    with open_store(settings.database_url) as store:
        found = store.round(context.round.id)
        assert found.state == (RoundState.RUNNING if goes_on else RoundState.DONE)
        assert goes_on or (store.stage(found.id, "select").row().result or {})["selected"] == ["theirs"]


def test_an_error_in_a_round_that_another_process_has_ended_is_no_end_of_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: pytest.fail(notice.text))

    def met(problem: BaseException) -> None:
        with flow.opened(settings, fresh=False) as context:
            context.store.finish_round(context.round.id, RoundState.DONE, "nothing was lacking")
            raise problem

    for problem in (OSError("disk full"), KeyboardInterrupt()):
        with pytest.raises(type(problem)):
            met(problem)
    with open_store(settings.database_url) as store:
        assert {row.state for row in store.rows(Round)} == {RoundState.DONE}


def test_two_processes_that_begin_at_the_same_moment_have_one_round(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one command is started on two machines at once: neither finds a round, and both would play a whole."""
    look, both = stage_file._round_to_resume, threading.Barrier(2, timeout=30)

    def looked(*given: Any) -> Any:
        found = look(*given)
        both.wait()
        return found

    monkeypatch.setattr(stage_file, "_round_to_resume", looked)
    with ThreadPoolExecutor(2) as pool:
        opened = list(pool.map(lambda _: stage_file.open_context(settings).round.id, range(2)))
    assert opened[0] == opened[1]
    assert stage_file.open_context(settings, fresh=True).round.number == 2


def test_a_process_that_has_ended_on_this_machine_works_on_nothing(settings: Settings) -> None:
    with flow.opened(settings, fresh=False) as context:
        ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        owner = f"{socket.gethostname()}:{int(ended.stdout)}:ab"
        assert context.store.stage(context.round.id, "challenge").claim(owner, lease_seconds=600)
    with flow.opened(settings, fresh=False) as again:
        assert again.left
    assert states(settings, OSError("disk full")) == [RoundState.INTERRUPTED]


@pytest.mark.parametrize("signal", [Pause(), Abort(), TerminationSignal(15)])
def test_a_run_that_a_person_suspends_or_cancels_has_not_died(settings: Settings, signal: BaseException) -> None:
    """Prefect ends it by what is no `Exception`."""
    assert states(settings, signal) == [RoundState.INTERRUPTED]
    with flow.opened(settings, fresh=False) as again:
        assert not again.left


def test_a_process_that_holds_no_stage_lives_while_it_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two stages, for as long as a person is waited for, or while a training's own process starts."""
    monkeypatch.setattr("db.store.owner_name", lambda: "elsewhere:1:ab")
    with flow.opened(settings, fresh=False) as waits:
        monkeypatch.undo()
        with flow.opened(settings, fresh=False) as second:
            assert not second.left
        assert states(settings, KeyboardInterrupt(), OSError("disk full")) == [RoundState.RUNNING]
        with waits.store.transaction() as connection:  # it dies, and its lease runs out
            connection.execute(text(f"UPDATE stages SET lease_until = '2020-01-01' WHERE name LIKE '{PROCESS}%'"))
        with flow.opened(settings, fresh=False) as next_one:
            assert next_one.left


class AwayAtFirst:
    """Stands for the order of stages: the store is away the first few times that it is asked."""

    def __init__(self, times: int, problem: StoreError) -> None:
        self.left, self.problem = times, problem

    def __call__(self, context: object, last: str) -> Iterator[tuple[str, dict[str, str]]]:
        yield "rollout", {"": "done"}
        if self.left:
            self.left -= 1
            raise self.problem
        yield last, {"": "done"}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(flow.time, "sleep", seconds.append)
    return seconds


def gone(transient: bool) -> StoreError:
    problem = StoreError("database 'postgresql://store' does not answer")
    problem.transient = transient
    return problem


CONTEXT: Any = SimpleNamespace(round=SimpleNamespace(number=3))


def test_a_round_outlasts_a_store_that_is_away_between_two_stages(
    monkeypatch: pytest.MonkeyPatch, waited: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flow, "stages", AwayAtFirst(2, gone(transient=True)))
    assert dict(flow.outlasting(CONTEXT, "gate")) == {"rollout": {"": "done"}, "gate": {"": "done"}}
    assert waited == [15, 30]
    assert "does not answer; round 3 waits 15 s for it, then goes on" in caplog.text


def test_a_round_outlasts_many_short_outages_each_as_if_it_were_the_first(
    monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    steps = [("train", capability) for capability in "abcd"] + [(name, "") for name in ("register", "gate", "test")]
    done: list[tuple[str, str]] = []

    def away_before_each(context: object, last: str) -> Iterator[tuple[str, dict[str, str]]]:
        for name, capability in steps:
            if (name, capability) not in done:
                done.append((name, capability))
                raise gone(transient=True)
            yield name, {capability: "done"}

    monkeypatch.setattr(flow, "stages", away_before_each)
    assert set(dict(flow.outlasting(CONTEXT))) == {"train", "register", "gate", "test"}
    assert waited == [15] * len(steps)


@pytest.mark.parametrize(("transient", "waits"), [(True, list(flow.PATIENCE)), (False, [])])
def test_a_store_that_stays_away_or_holds_what_cannot_be_ends_the_round(
    monkeypatch: pytest.MonkeyPatch, waited: list[float], transient: bool, waits: list[float]
) -> None:
    monkeypatch.setattr(flow, "stages", AwayAtFirst(99, gone(transient)))
    with pytest.raises(StoreError, match="does not answer"):
        list(flow.outlasting(CONTEXT, "gate"))
    assert waited == waits
