"""`trace-agent down` while `trace-agent up` starts: what does not listen yet is awaited and stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from errors import ConfigurationError, StoreError
from flows import services as services_file
from flows.cli.main import app
from flows.cli.operations import down
from flows.services import Ports, Services, running, stop
from flows.session import alone_in
from settings import load_settings
from tests.integration.servers import free_port


@pytest.fixture
def services(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    """Services none of which ever answers."""

    def programs(made: Services) -> dict[str, list[str]]:
        return {name: [sys.executable, "-c", "import time; time.sleep(600)"] for name in vars(made.ports)}

    monkeypatch.setattr(Services, "programs", programs)
    # A program that is stopped as it starts may not hear of it: it is killed.
    monkeypatch.setattr(services_file, "SECONDS_TO_END", 1)
    ports = {free_port(): None for _ in range(9)}  # the same may be free twice
    return Services(load_settings(home=settings_folder / "home"), Ports(*[*ports][:4]))


@pytest.fixture
def up(services: Services) -> Iterator[Callable[[], str]]:
    """Run `trace-agent up` to its end; what it says."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process has it ignored
    ports = [f"--{name}-port={port}" for name, port in vars(services.ports).items()]

    def run() -> str:
        done = CliRunner().invoke(app, ["up", "--home", str(services.settings.folder), *ports])
        if done.exception:
            raise done.exception
        return done.output

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_down_stops_services_that_are_starting(
    services: Services, up: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holds, configuration, problems = threading.Event(), Services.configuration, list[Exception]()

    def slow(made: Services) -> str:
        holds.set()
        time.sleep(1)
        return configuration(made)

    def other_terminal() -> None:
        holds.wait(30)
        try:
            assert not services.socket.exists(), "its supervisor does not listen yet"
            down(services.settings.folder)
        except Exception as problem:  # of a thread, which would end unheard
            problems.append(problem)
            stop(services.socket)

    monkeypatch.setattr(Services, "configuration", slow)
    monkeypatch.setattr(services_file, "SECONDS_TO_START", 20.0)
    thread = threading.Thread(target=other_terminal)
    thread.start()
    began = time.monotonic()
    said = up()
    thread.join(20)
    assert problems == []
    assert "are stopped" in said
    assert not running(services.socket)
    assert time.monotonic() - began < 15, "nobody waits any longer for what was stopped"


def test_an_up_that_starts_ends_well_when_it_is_stopped_and_with_an_error_else(
    services: Services, up: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_terminal() -> None:
        while not stop(services.socket) and time.monotonic() - began < 20:
            time.sleep(0.05)

    thread, began = threading.Thread(target=other_terminal), time.monotonic()
    thread.start()
    assert "are stopped" in up()
    thread.join(20)
    monkeypatch.setattr(services_file, "SECONDS_TO_START", 2.0)
    with pytest.raises(StoreError, match="prefect is not healthy"):
        up()  # which nobody has stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_up_that_ctrl_c_or_kill_stops_while_it_starts_ends_well(
    services: Services, up: Callable[[], str], number: signal.Signals
) -> None:
    def person() -> None:
        deadline = time.monotonic() + 20
        while not running(services.socket) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=person)
    thread.start()
    assert "are stopped" in up()
    thread.join(20)
    assert not running(services.socket)


def test_down_waits_for_what_ends_and_no_longer_than_a_stop_may_take(
    services: Services, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = services.settings.folder
    for _ in ("no folder", "a folder that nobody holds"):
        with pytest.raises(ConfigurationError, match="no services run for"):
            down(home)
        services.folder.mkdir(parents=True, exist_ok=True)
    holds, free = threading.Event(), threading.Event()

    def other() -> None:
        with alone_in(services.folder, ""):
            holds.set()
            free.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    holds.wait(10)
    with monkeypatch.context() as soon:
        soon.setattr(services_file, "SECONDS_TO_STOP", 0.3)
        with pytest.raises(StoreError, match="neither listens nor ends"):
            down(home)
    threading.Timer(0.3, free.set).start()
    down(home)
    thread.join(10)
    assert f"the services of {home} are stopped" in capsys.readouterr().out
