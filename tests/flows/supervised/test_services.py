"""`trace-agent up`'s supervisor with services that stand for the real ones: started, restarted, refused, stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from db import Store, open_store
from errors import ConfigurationError, StoreError
from flows import services as services_file
from flows.cli.main import app
from flows.services import Ports, Services, answers, follow, given_up, pids, running, stop
from settings import load_settings
from tests.integration.servers import free_port

ROOT = Path(__file__).parents[3]
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
    ports = {free_port(): None for _ in range(9)}  # the same may be free twice
    return Standing(load_settings(home=home), Ports(*[*ports][:4]))


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

    def has_round() -> bool:
        asked.append(1)
        if len(asked) == 1:
            raise StoreError("database is locked")
        return bool(rounds)

    asked: list[int] = []
    thread = threading.Thread(target=follow, args=(services, has_round, said.append))
    thread.start()
    while len(asked) < 2:  # what does not answer once is asked again
        time.sleep(0.01)
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
    assert "supervisor was stopped" in said[-1]
    assert not thread.is_alive()
    assert any("gateway runs as process" in s for s in said)
    assert not any(psutil.pid_exists(pid) for pid in alive)
    assert not running(services.socket)
    assert not stop(services.socket), "a second time there is nothing to stop"


def test_what_lives_and_does_not_answer_is_killed_and_started_again(
    services: Services, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("ASKED_EVERY", 0.1), ("SECONDS_TO_ANSWER", 0.5), ("SECONDS_TO_HANG", 1.0)):
        monkeypatch.setattr(services_file, name, seconds)
    services.wait_for("prefect", "mlflow")
    said, asked = list[str](), list[str]()
    status_of = services_file.status_of
    monkeypatch.setattr(services_file, "status_of", lambda url: (status_of(url), asked.append(url))[0])
    thread = threading.Thread(target=follow, args=(services, lambda: False, said.append))
    thread.start()
    deadline = time.monotonic() + 30
    while len(asked) < 4 and time.monotonic() < deadline:  # each has answered
        time.sleep(0.01)
    stopped = pids(started)["mlflow"]
    os.kill(stopped, signal.SIGSTOP)
    while pids(started)["mlflow"] in (0, stopped) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(stopped)
    services.wait_for("mlflow")
    assert "mlflow lives and has not answered for 1 s: it is killed, to be started again" in said
    assert not any("prefect" in line for line in said)
    assert stop(services.socket)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("mended", [True, False])
def test_what_supervisor_has_given_up_is_tried_again(
    services: Services, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """What its starts failed for, a full disk or a file of settings, may be over by then."""
    ready, said = services.settings.folder / "mended", list[str]()
    failing = f"import pathlib, sys; pathlib.Path({str(ready)!r}).exists() or sys.exit(1); {SERVE}"
    command, programs = [sys.executable, "-c", failing, str(services.ports.mlflow)], services.programs()
    configuration = services.configuration
    monkeypatch.setattr(Standing, "programs", lambda made: programs | {"mlflow": command})
    monkeypatch.setattr(Standing, "configuration", lambda made: configuration().replace("tries=20", "tries=0"))
    monkeypatch.setattr(services_file, "GIVEN_UP_EVERY", 0.2)
    with services.started() as supervisor:
        deadline = time.monotonic() + 30
        while given_up(supervisor) != ["mlflow"] and time.monotonic() < deadline:
            time.sleep(0.05)
        if mended:
            ready.touch()
        thread = threading.Thread(target=follow, args=(services, lambda: False, said.append))
        thread.start()
        tried = f"mlflow failed at every start, and is tried again: its log is {services.log('mlflow')}"
        while said.count(tried) < (1 if mended else 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        if mended:
            services.wait_for("mlflow")
        assert stop(services.socket)
        thread.join(10)
    assert tried in said


def test_of_two_that_start_at_once_one_is_refused_and_touches_nothing(services: Services) -> None:
    for _ in range(2):  # each looks before either has begun
        services.check()
    with services.started() as supervisor:
        with pytest.raises(ConfigurationError, match="another 'trace-agent up' is running"), services.started():
            pass
        assert supervisor.getState()["statename"] == "RUNNING"


def test_the_folder_is_the_owners_alone(services: Services, started: Any) -> None:
    assert services.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("stored", "target"), [("", []), ("traffic", []), ("other", ["--target", "shop"])])
def test_up_says_where_all_is_when_all_is_well_and_down_ends_it(
    services: Services, monkeypatch: pytest.MonkeyPatch, stored: str, target: list[str]
) -> None:
    """A round that the gateway would not serve starts none: it would end, and be started, again and again."""
    deployed, healthy, has_round, gateway = list[Services](), threading.Event(), list[bool](), list[int]()
    with open_store(services.settings.database_url) as store:
        if stored:
            store.start_round(stored, "d", 1, "laptop", {})

    def followed(made: Services, has: Callable[[], bool], say: Callable[[str], object]) -> None:
        gateway.append(pids(made.connection())["gateway"])
        has_round.append(has())
        with open_store(services.settings.database_url) as store:
            store.start_round("shop", "d", 1, "laptop", {})
        has_round.append(has())
        healthy.set()
        follow(made, lambda: False, say)

    monkeypatch.setattr(Services, "programs", Standing.programs)
    monkeypatch.setattr(Services, "make_deployments", lambda made: deployed.append(made) or ["what it took back"])
    monkeypatch.setattr(services_file, "follow", followed)
    ended: list[subprocess.CompletedProcess[str]] = []

    def other_terminal() -> None:
        healthy.wait(60)
        command = [sys.executable, "-m", "flows.cli.main", "down", "--home", str(services.settings.folder)]
        ended.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60))

    thread = threading.Thread(target=other_terminal)
    before = signal.getsignal(signal.SIGTERM)
    try:
        thread.start()
        ports = [f"--{name}-port={port}" for name, port in vars(services.ports).items()]
        home = str(services.settings.folder)
        done = CliRunner().invoke(app, ["up", "--home", home, *ports, *target], catch_exceptions=False)
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join(60)
    assert done.exit_code == 0, done.output
    assert (len(deployed), gateway, has_round) == (1, [0], [False, True])
    lines = (*services.addresses(), "the gateway starts when there is a round", "all healthy after", "are stopped")
    assert [line for line in lines if line not in done.output] == []
    assert re.search(rf"what it took back.*{services.addresses()[0]}.*all healthy after", done.output, re.DOTALL)
    assert (ended[0].returncode, "are stopped" in ended[0].stdout) == (0, True), ended[0].stderr
    assert not running(services.socket)


def test_a_gateway_that_still_loads_takes_nothing_down_with_it(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large base takes longer than anything else may, and vLLM may be away: nights go on without it."""

    def programs(made: Services) -> dict[str, list[str]]:
        standing = Standing(made.settings, made.ports).programs()
        return standing | {"gateway": [sys.executable, "-c", "import time; time.sleep(600)"]}

    wait_for = Services.wait_for

    def waited(made: Services, *names: str) -> None:
        wait_for(made, *names)
        if "worker" in names:
            monkeypatch.setattr(services_file, "SECONDS_TO_START", 0.5)

    def deploy(made: Services) -> list[str]:
        return pytest.fail("it would begin with missed nights") if dict(pids(made.connection()))["worker"] else []

    def followed(made: Services, *given: Any) -> None:
        thread = threading.Thread(target=follow, args=(made, *given))
        thread.start()
        time.sleep(0.5)
        alive.update(pids(made.connection()), prefect=answers(made.health["prefect"]))
        assert stop(made.socket)
        thread.join(10)

    alive: dict[str, int] = {}
    for name, instead in (("programs", programs), ("make_deployments", deploy), ("wait_for", waited)):
        monkeypatch.setattr(Services, name, instead)
    monkeypatch.setattr(services_file, "follow", followed)
    monkeypatch.setattr(Store, "rows", lambda *given: [SimpleNamespace(target="shop", number=1, profile="")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        ports = [f"--{name}-port={port}" for name, port in vars(services.ports).items()]
        done = CliRunner().invoke(app, ["up", "--home", str(services.settings.folder), *ports], catch_exceptions=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 0, done.output
    assert all(alive.values()), alive
    late = f"the gateway is not healthy yet: {services.folder / 'gateway.log'}"
    for line in (*services.addresses(), late, "all others healthy after", "supervisor was stopped", "are stopped"):
        assert line in done.output


def test_a_stop_waits_for_as_long_as_supervisor_gives_the_services_and_where_another_has_begun_it(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervisor stops them one after the other, and each may use what it is given."""
    given = re.findall(r"stopwaitsecs=(\d+)", services.configuration())
    assert (len(given), sum(map(int, given)) < services_file.SECONDS_TO_STOP) == (4, True)
    slow = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE}"
    serving = services.programs()
    monkeypatch.setattr(Standing, "programs", lambda made: {n: [c[0], "-c", slow, c[-1]] for n, c in serving.items()})
    monkeypatch.setattr(services_file, "SECONDS_TO_END", 1)
    with services.started() as supervisor:
        services.wait_for("prefect", "mlflow")
        alive = [pid for pid in pids(supervisor).values() if pid]
        supervisor.shutdown()
        assert all(psutil.pid_exists(pid) for pid in alive), "they still stop"
        assert stop(services.socket), "a stop that is under way is no absence"
        assert not any(psutil.pid_exists(pid) for pid in alive)


def left_of(services: Services) -> list[int]:
    """Processes that were started for a home."""
    ports = {str(port) for port in vars(services.ports).values()}
    lines = {one.pid: one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if ports & set(line) or str(services.folder) in " ".join(line)]


@pytest.mark.parametrize("after", [0.0, 1.0], ids=["at once", "while the programs start"])
def test_a_stop_before_supervisor_listens_leaves_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    def stopped(*_: Any) -> None:
        end = time.monotonic() + 20
        while after and len(left_of(services)) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(Services, "wait", stopped)
    if after:  # its socket is there by then
        monkeypatch.setattr(services_file, "stop", lambda path: False)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), services.started():
        pass
    assert left_of(services) == []
    assert time.monotonic() - began < 25


def test_a_supervisor_that_was_killed_is_told_from_a_stop_and_leaves_nothing(services: Services) -> None:
    said: list[str] = []

    def killed() -> None:
        with services.started() as supervisor:
            services.wait_for("prefect", "mlflow")
            os.kill(os.getsid(pids(supervisor)["mlflow"]), signal.SIGKILL)
            follow(services, lambda: False, said.append)

    with pytest.raises(StoreError, match=r"supervisor was killed or failed \(exit status -9\)"):
        killed()
    assert "supervisor was stopped" in said[-1]
    assert left_of(services) == []
    services.check()  # no port is taken


def test_a_supervisor_that_does_not_stop_is_killed_with_what_it_has_started(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(path: Path) -> bool:
        raise StoreError("the services did not stop within 160 s")

    monkeypatch.setattr(services_file, "stop", failed)
    with pytest.raises(StoreError, match="did not stop within"), services.started():
        services.wait_for("prefect", "mlflow")
    assert left_of(services) == []


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


def test_settings_that_the_services_would_not_read_are_refused(
    services: Services, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the project's folder; limits that hold here alone would hold no night."""
    (settings_folder / "trace.toml").write_text("[limits]\nhours = 8\n")
    with pytest.raises(ConfigurationError, match=r"trace\.toml counts here and for none of the services, .*; move it"):
        services.check()
    monkeypatch.setattr(services_file, "PROJECT", settings_folder)
    services.check()


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


def test_a_target_that_does_not_exist_is_refused_before_anything_starts(services: Services) -> None:
    done = CliRunner().invoke(app, ["up", "--home", str(services.settings.folder), "--target", "shpo"])
    assert "did you mean shop?" in str(done.exception)
    assert not services.folder.exists()
