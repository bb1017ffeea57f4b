"""What a killed process was shown at work as, in Prefect and MLflow, is shown as ended by the next process of the home,
and only that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Completed, Running

from db import Round, RoundState, Store, open_store
from flows import improve
from flows.runs import left_running
from flows.runs.left_running import FLOW_RUN, end_left_runs, left_runs_ended
from models.adapters.registry import Registry
from settings import Settings, load_settings
from tasks.round.registry import open_registry, round_key
from tasks.unattended.alive import LEASE_SECONDS


def ended_owner() -> str:
    """The owner's name of a process of this machine that has ended."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return f"{socket.gethostname()}:{int(ended.stdout)}:ab"


@dataclass(frozen=True)
class Home:
    """A home with Prefect's server and a registry; `owner` is the process that has its rounds open."""

    settings: Settings
    store: Store
    patch: pytest.MonkeyPatch

    @property
    def registry(self) -> Registry:
        return open_registry(self.settings, "shop")

    def flow_run(self) -> str:
        """A run that Prefect shows as running."""
        with get_client(sync_client=True) as client:
            flow = client.create_flow_from_name("left")
            deployed = client.create_deployment(flow_id=flow, name="left")
            return str(client.create_flow_run_from_deployment(deployed, state=Running()).id)

    def round_of(self, owner: str, flow_run: str, lease: float = 1e-6) -> Round:
        """A round that a process has open, as Prefect's run `flow_run`; with its runs in MLflow."""
        made = self.store.start_round("shop", "d", 1, "smoke", {})
        self.patch.setattr("db.store.owner_name", lambda: owner)
        self.store.presence(made.id, lease, {FLOW_RUN: flow_run}).beat()
        run = self.registry.start_run(round_key(made.id), {"round": made.id})
        self.registry.start_run(f"{made.id}-train", {"round": made.id}, parent=run)
        return made

    def shown(self, flow_run: str) -> str:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run)).state
        assert state is not None
        return state.name

    def runs(self, made: Round) -> set[str]:
        found = self.registry.client.search_runs([self.registry.experiment_id], f"tags.round = '{made.id}'")
        return {run.info.status for run in found}


@pytest.fixture
def home(prefect: None, settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    settings = load_settings(profile="smoke", home=settings_folder / "home")
    with open_store(settings.database_url) as store:
        yield Home(settings, store, monkeypatch)


def test_a_killed_process_is_shown_as_crashed_and_its_runs_as_killed_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = home.flow_run(), home.flow_run()
    left, mine = home.round_of(ended_owner(), run), home.round_of(ended_owner(), other)
    assert end_left_runs(home.settings, home.store, mine.id) is False
    assert (home.shown(run), home.runs(left)) == ("Crashed", {"KILLED"})
    assert (home.shown(other), home.runs(mine)) == ("Crashed", {"RUNNING"}), "its run is gone on with"
    again = home.registry.start_run(round_key(left.id), {"round": left.id})
    assert home.runs(left) == {"RUNNING", "KILLED"}
    home.registry.end_run(again)
    assert home.runs(left) == {"FINISHED", "KILLED"}
    monkeypatch.setattr(left_running, "get_client", lambda **given: pytest.fail("asked again"))
    monkeypatch.setattr(left_running, "open_registry", lambda *given: pytest.fail("asked again"))
    assert end_left_runs(home.settings, home.store) is False
    assert len(home.store.presences()) == 2, "who died is known by it"


@pytest.mark.parametrize(
    ("owner", "lease", "later"),
    [
        ("this process", 1e-6, False),  # suspended for longer than its lease
        ("elsewhere:1:ab", 1e-6, False),  # away from the database for a while, or killed: that machine knows
        ("elsewhere:1:ab", 3600.0, False),
        ("ended", 3600.0, True),  # a machine of the same name has a process of that number
    ],
)
def test_who_may_live_is_let_alone(home: Home, owner: str, lease: float, later: bool) -> None:
    run = home.flow_run()
    mine = f"{socket.gethostname()}:{os.getpid()}:ab"
    made = home.round_of({"ended": ended_owner(), "this process": mine}.get(owner, owner), run, lease)
    assert end_left_runs(home.settings, home.store) is later
    assert (home.shown(run), home.runs(made)) == ("Running", {"RUNNING"})


def test_what_others_still_work_on_keeps_its_run_in_mlflow(home: Home) -> None:
    """As a training in a process of its own, which outlives the round's for a while."""
    run = home.flow_run()
    made = home.round_of(ended_owner(), run)
    training = home.store.stage(made.id, "train:refund")
    assert training.claim("elsewhere:1:cd", lease_seconds=3600)
    end_left_runs(home.settings, home.store)
    assert (home.shown(run), home.runs(made)) == ("Crashed", {"RUNNING"})
    training.fail("its parent is gone")
    end_left_runs(home.settings, home.store)
    assert home.runs(made) == {"KILLED"}


def test_a_run_that_has_ended_or_began_again_is_no_dead_ones(home: Home) -> None:
    done, again = home.flow_run(), home.flow_run()
    home.round_of(ended_owner(), done)
    home.round_of(ended_owner(), again)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(done), Completed())
        client.set_flow_run_state(UUID(again), Running(), force=True)
    end_left_runs(home.settings, home.store)
    assert (home.shown(done), home.shown(again)) == ("Completed", "Running")


AWAY = "refused by http://trace:sesame@127.0.0.1:4200/api"


def test_servers_that_are_away_end_no_round_and_are_told_later(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = home.flow_run()
    home.round_of(ended_owner(), run)
    with monkeypatch.context() as patch:
        patch.setattr(left_running, "get_client", lambda **given: (_ for _ in ()).throw(ConnectionError(AWAY)))
        assert end_left_runs(home.settings, home.store) is False
    assert "still shown as running (ConnectionError: refused by http://127.0.0.1:4200/api)" in caplog.text
    end_left_runs(home.settings, home.store)
    assert home.shown(run) == "Crashed"


def test_one_that_was_killed_just_now_is_told_when_its_lease_has_run_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[float, Any]] = []
    timer = SimpleNamespace(start=lambda: None, cancel=lambda: None, join=lambda: None)
    monkeypatch.setattr(left_running.threading, "Timer", lambda s, *call: began.append((s, call)) or timer)
    with left_runs_ended(home.settings, home.store, "mine"):
        assert began == [], "nobody died"
    home.round_of(ended_owner(), home.flow_run(), lease=3600.0)
    with left_runs_ended(home.settings, home.store, "mine"):
        assert began == [(LEASE_SECONDS + 1, (end_left_runs, (home.settings, home.store, "mine")))]


def test_an_open_round_says_as_which_run_it_is_shown(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is broken off leaves no run of a part as running."""
    monkeypatch.setattr(left_running, "flow_run", SimpleNamespace(id="a-run"))

    def broken_off() -> None:
        with improve.opened(home.settings, fresh=False) as context:
            (present,) = home.store.presences()
            assert present.result == {FLOW_RUN: "a-run"}
            context.part_run(f"{context.round.id}-train", "refund")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert home.store.presences() == []
    (ended,) = home.store.rows(Round)
    assert (ended.state, home.runs(ended)) == (RoundState.INTERRUPTED, {"KILLED"})
