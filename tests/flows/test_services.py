"""`trace-agent up`'s supervisor with services that stand for the real ones: started, restarted, refused, stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from errors import ConfigurationError, StoreError
from flows import services as services_file
from flows.services import Ports, Services, answers, follow, pids, running, stop
from settings import load_settings
from tests.integration.servers import free_port

SERVE = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), type('H', \
(http.server.BaseHTTPRequestHandler,), {'do_GET': lambda s: (s.send_response(200), s.end_headers())})).serve_forever()"


class Standing(Services):
    """Every service is a server of a few lines that answers 200 on its port."""

    def programs(self) -> dict[str, list[str]]:
        return {name: [sys.executable, "-c", SERVE, str(port)] for name, port in vars(self.ports).items()}


@pytest.fixture
def services(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    monkeypatch.setattr(services_file, "EVERY_SECONDS", 0.05)
    home = settings_folder / "with a space"
    return Standing(load_settings(home=home), Ports(*(free_port() for _ in range(4))))


@pytest.fixture
def started(services: Services) -> Iterator[Any]:
    services.check()
    with services.started() as supervisor:
        yield supervisor


def test_they_start_are_restarted_and_stop(services: Services, started: Any) -> None:
    services.wait_for("prefect", "mlflow")
    assert not answers(services.health["worker"]), "it waits for the pool"
    started.startProcess("worker", False)
    services.wait_for("worker")
    assert pids(started)["gateway"] == 0
    said: list[str] = []
    rounds: list[int] = []
    thread = threading.Thread(target=follow, args=(services.connection(), lambda: bool(rounds), said.append))
    thread.start()
    rounds.append(1)
    services.wait_for("gateway")
    killed = pids(started)["mlflow"]
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not any("mlflow died and" in s for s in said) and time.monotonic() < deadline:
        time.sleep(0.05)
    services.wait_for("mlflow")
    assert pids(started)["mlflow"] not in (0, killed)
    with pytest.raises(ConfigurationError, match="run already; stop them with 'trace-agent down --home"):
        services.check()
    alive = list(pids(started).values())
    assert stop(services.socket)
    thread.join(10)
    assert said[-1] == "stopping"
    assert not thread.is_alive()
    assert any("gateway runs as process" in s for s in said)
    assert not any(psutil.pid_exists(pid) for pid in alive)
    assert not running(services.socket)
    assert not stop(services.socket), "a second time there is nothing to stop"


def test_the_folder_is_the_owners_alone(services: Services, started: Any) -> None:
    assert services.folder.stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_is_named_with_what_to_do(services: Services) -> None:
    said = rf"port {services.ports.mlflow} of mlflow .*--mlflow-port"
    with socket.create_server(("127.0.0.1", services.ports.mlflow)), pytest.raises(ConfigurationError, match=said):
        services.check()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"home": "x" * 120}, "longer than 100 characters"),
        ({"home": "100%"}, "has a '%'"),
        ({"tracking": "http://127.0.0.1:5000"}, "clear TRACE_TRACKING"),
    ],
)
def test_what_cannot_be_kept_running(settings_folder: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Services(load_settings(**given), Ports()).check()


def test_a_service_that_does_not_come_up_is_named_with_its_log(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_file, "SECONDS_TO_START", 0.3)
    services.folder.mkdir(parents=True)
    (services.folder / "mlflow.log").write_text("database is locked")
    with pytest.raises(StoreError, match=r"mlflow is not healthy; its log .*mlflow\.log ends: database is locked"):
        services.wait_for("mlflow")


def test_a_stale_socket_is_no_service(services: Services) -> None:
    services.folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(services.socket))
    assert not running(services.socket)
    services.check()


def test_services_know_where_everything_is(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "CRITICAL")
    made = Services(load_settings(home=settings_folder / "home"), Ports(1, 2, 3, 4), "shop")
    environment = made.environment()
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert environment["TRACE_HOME"] == str(settings_folder / "home")
    assert "PREFECT_LOGGING_LEVEL" not in environment, "rounds of the worker show their lines in Prefect's pages"
    assert made.programs()["gateway"][-4:] == ["--port", "3", "--target", "shop"]
    assert not any("mlflow.db" in part for part in made.programs()["mlflow"]), "an address may hold a password"
    assert environment["MLFLOW_BACKEND_STORE_URI"].endswith("mlflow.db")
    assert made.addresses()[0].endswith("http://127.0.0.1:1")
