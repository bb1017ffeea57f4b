"""All services of a home on one machine, kept running by supervisor: `trace-agent up` and `trace-agent down`.

Prefect's server, MLflow's server, a worker, and the gateway, each a program of one supervisord, which starts again what
dies; what lives and no longer answers is killed, and so started again, too. What they write lies in the home: HOME/up
holds the configuration and a log for each, HOME/prefect Prefect's database. They listen on loopback alone.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xmlrpc.client
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import SupervisorTransport

from errors import ConfigurationError, StoreError
from flows.session import alone_in, end_session, served_already, until_stopped
from models.serving.gateway.settings import check_port
from settings import Settings, writable_folder

logger = logging.getLogger("trace")
HOST = "127.0.0.1"
# The longest path of a socket that the kernel takes.
LONGEST_PATH = 100
# An idle machine needs a small part of this; two cores that are busy otherwise may need it.
SECONDS_TO_START = 180.0
# Supervisor stops one after the other, Prefect's server last, which hears how a round ends. Each may take so long, the
# gateway for the answers that it is giving, before it is killed.
SECONDS_TO_END = 35
SECONDS_TO_STOP = 4 * SECONDS_TO_END + 20.0
EVERY_SECONDS = 2.0
# How often each is asked whether it is well, how long an answer may take, and without one for how long it hangs.
ASKED_EVERY, SECONDS_TO_ANSWER, SECONDS_TO_HANG = 15.0, 5.0, 300.0
# How often a service is started again that supervisor has given up, because it failed at every start.
GIVEN_UP_EVERY = 60.0
PROJECT = Path(__file__).parents[1]


def _is_here(place: str) -> bool:
    """Whether a setting names a SQLite file or a folder by a path from the working folder on."""
    file = place.partition(":///")[2] if place.startswith("sqlite") else ""
    return not Path(file or place).is_absolute() and (bool(file) or (bool(place) and Path(place).is_dir()))


@dataclass(frozen=True)
class Ports:
    """Where the services listen."""

    prefect: int = 4200
    mlflow: int = 5000
    gateway: int = 8900
    worker: int = 8080


@dataclass(frozen=True)
class Services:
    """The services of one home."""

    settings: Settings
    ports: Ports
    target: str | None = None

    @property
    def folder(self) -> Path:
        """Configuration and logs."""
        return self.settings.folder / "up"

    @property
    def socket(self) -> Path:
        """Where supervisord is spoken to; its folder is the owner's alone."""
        return self.folder / "s"

    @property
    def health(self) -> dict[str, str]:
        """The address that answers 200 when a service is well."""
        p = self.ports
        return {
            "prefect": f"http://{HOST}:{p.prefect}/api/health",
            "mlflow": f"http://{HOST}:{p.mlflow}/health",
            "worker": f"http://{HOST}:{p.worker}/health",
            "gateway": f"http://{HOST}:{p.gateway}/health",
        }

    def connection(self) -> Any:
        """supervisord's interface; one for each thread that speaks to it."""
        return connect(self.socket)

    def addresses(self) -> list[str]:
        """Where a person finds each, a line each."""
        pages = {"prefect": "Prefect", "mlflow": "MLflow", "gateway": "gateway"}
        return [f"{title:<8} http://{HOST}:{getattr(self.ports, name)}" for name, title in pages.items()]

    def check(self) -> None:
        """Raise `ConfigurationError` when they run already, would read other settings, or a port is taken."""
        # Supervisor starts them in the project's folder, and Prefect's worker a run there, too (prefect.yaml).
        mine, theirs = Path("trace.toml").resolve(), (PROJECT / "trace.toml").resolve()
        if mine.is_file() and mine != theirs:
            raise ConfigurationError(
                f"{mine} counts here and for none of the services, which run in {PROJECT} and read {theirs} alone; "
                "move it there, or set its values as TRACE_ variables and start from a folder without it"
            )
        for one in ("database", "tracking", "base_model", "toolsandbox", "tau2_tasks") if Path.cwd() != PROJECT else ():
            if _is_here(given := getattr(self.settings, one)):
                raise ConfigurationError(f"{one} is {given!r}; services look for it in {PROJECT}; give a whole path")
        if len(str(self.socket)) > LONGEST_PATH:
            raise ConfigurationError(
                f"the path of {self.socket} is longer than {LONGEST_PATH} characters, which no socket may have; give a "
                "home with a shorter path"
            )
        if "%" in str(self.settings.folder):
            raise ConfigurationError(f"{self.settings.folder} has a '%', which supervisor cannot read; give another")
        if self.settings.tracking.startswith("http"):
            raise ConfigurationError(
                "the setting tracking names an MLflow server, and this starts one of its own; clear TRACE_TRACKING, or "
                "start worker and gateway by themselves (docs/1-running.md)"
            )
        if running(self.socket):
            raise ConfigurationError(
                f"the services of {self.settings.folder} run already; stop them with 'trace-agent down --home "
                f"{self.settings.folder}'"
            )
        ports = vars(self.ports)
        for name, port in ports.items():
            if other := next((n for n, p in ports.items() if p == port and n != name), ""):  # one would answer for both
                raise ConfigurationError(f"{name} and {other} have the same port, {port}; give each its own")
            check_port(HOST, port, name, f"--{name}-port")

    def environment(self) -> dict[str, str]:
        """What the services get: this process's variables, and where everything is."""
        kept = {k: v for k, v in os.environ.items() if (k, v) != ("PREFECT_LOGGING_LEVEL", "CRITICAL")}
        if self.target:  # a run of a deployment that names no target takes that of the settings
            kept["TRACE_TARGET"] = self.target
        return kept | {
            "PREFECT_API_URL": f"http://{HOST}:{self.ports.prefect}/api",
            "PREFECT_HOME": str(self.settings.folder / "prefect"),
            # As in prefect.yaml, for what the worker itself tells the server.
            "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
            "PREFECT_SERVER_API_PORT": str(self.ports.prefect),
            "PREFECT_UI_API_URL": "/api",
            "PREFECT_WORKER_WEBSERVER_HOST": HOST,
            "PREFECT_WORKER_WEBSERVER_PORT": str(self.ports.worker),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            # Not on its command line, which every user of the machine can read: it may hold a password.
            "MLFLOW_BACKEND_STORE_URI": self.settings.tracking_uri,
            "TRACE_HOME": str(self.settings.folder),
            "TRACE_PROJECT": str(PROJECT),
            # A target of one's own in the working folder is found by the runs, too.
            "PYTHONPATH": os.pathsep.join(p for p in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if p),
        }

    def programs(self) -> dict[str, list[str]]:
        """The command of each service. The worker plays one run at a time, as in docker/Dockerfile."""
        python, p = sys.executable, self.ports
        serve = [python, "-m", "flows.cli.main", "serve", "--port", str(p.gateway)]
        return {
            "prefect": [python, "-m", "flows.prefect_server", "--host", HOST, "--port", str(p.prefect)],
            "mlflow": [
                python, "-m", "mlflow", "server", "--host", HOST, "--port", str(p.mlflow), "--workers", "1",
            ],
            "worker": [
                python, "-m", "prefect", "worker", "start", "--pool", "trace", "--type", "process", "--limit", "1",
                "--with-healthcheck",
            ],
            "gateway": [*serve, "--target", self.target] if self.target else serve,
        }  # fmt: skip

    def configuration(self) -> str:
        """supervisord's file. Worker and gateway are started later: they need the others, and a round to serve."""
        files = {"logfile": "supervisord.log", "pidfile": "supervisord.pid", "childlogdir": ""}
        text = ["[supervisord]", "nodaemon=true", "silent=true", f"directory={PROJECT}"]
        text += [f"{key}={self.folder / name}" for key, name in files.items()]
        text += ["[unix_http_server]", f"file={self.socket}", "chmod=0600", "[rpcinterface:supervisor]"]
        text.append("supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface")
        for name, command in self.programs().items():
            text += [
                f"[program:{name}]", "command=" + " ".join(f'"{part}"' for part in command),
                f"autostart={'true' if name in ('prefect', 'mlflow') else 'false'}", "autorestart=true", "startsecs=2",
                "startretries=20", "stopasgroup=true", "killasgroup=true", f"stopwaitsecs={SECONDS_TO_END}",
                "redirect_stderr=true", f"stdout_logfile={self.log(name)}", "stdout_logfile_maxbytes=10MB",
                "stdout_logfile_backups=2",
            ]  # fmt: skip
        return "\n".join(text) + "\n"

    @contextmanager
    def started(self) -> Iterator[Any]:
        """supervisord with Prefect and MLflow; its interface. All of it is stopped at the end of the block, however
        that ends. Raises `StoreError` where supervisord did not end by a stop: it was killed, or failed."""
        writable_folder(self.folder)
        self.folder.chmod(0o700)
        with alone_in(self.folder, served_already(self.folder.parent)):
            file = self.folder / "supervisord.conf"
            file.write_text(self.configuration(), encoding="utf-8")
            # A session of its own: Ctrl-C is for this process, which stops them in order.
            command, quiet = [sys.executable, "-m", "supervisor.supervisord", "-c", str(file)], subprocess.DEVNULL
            process = subprocess.Popen(command, env=self.environment(), start_new_session=True, stdout=quiet)
            try:
                self.wait(lambda: running(self.socket) or process.poll() == 0, "supervisor", process)
                with until_stopped(lambda: running(self.socket)):
                    yield self.connection()
            finally:
                status = end(process, self.socket)
        if status not in (0, -signal.SIGTERM):
            raise StoreError(
                f"supervisor was killed or failed (exit status {status}), and what it left running is stopped; look "
                f"at {self.folder / 'supervisord.log'} and at the machine's memory, then start them again"
            )

    def log(self, name: str) -> Path:
        """What a service writes."""
        return self.folder / f"{name}.log"

    def wait(self, ready: Callable[[], bool], what: str, process: Any = None) -> None:
        """Return when it is ready. Raises `StoreError` with the end of its log when it is late, or has ended."""
        deadline = time.monotonic() + SECONDS_TO_START
        while not ready():
            dead = process is not None and process.poll() is not None
            if dead or time.monotonic() > deadline or (process is None and not running(self.socket)):
                log = self.log(what)
                tail = log.read_text(errors="replace")[-1500:] if log.is_file() else "no log"
                raise StoreError(f"{what} {'ended' if dead else 'is not healthy'}; its log {log} ends: {tail}")
            time.sleep(0.25)

    def wait_for(self, *names: str) -> None:
        """Return when these services are healthy."""
        for name in names:
            self.wait(lambda name=name: answers(self.health[name]), name)  # type: ignore[misc]

    def in_time(self, name: str) -> bool:
        """Whether a service is healthy before `wait_for` would give it up."""
        with suppress(StoreError):
            self.wait_for(name)
        return answers(self.health[name])

    def make_deployments(self) -> list[str]:
        """What `trace-agent deploy` does, on the server that was started; its words on what it undid there."""
        command = [sys.executable, "-m", "flows.cli.main", "deploy", "--project", str(PROJECT)]
        given = self.environment() | {"PYTHONPATH": os.pathsep.join([str(PROJECT), self.environment()["PYTHONPATH"]])}
        done = subprocess.run(command, env=given, cwd=PROJECT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StoreError(f"the deployments were not made: {done.stderr.strip()[-1500:]}")
        return [line for line in done.stdout.splitlines() if "schedule of " in line or "missed runs" in line]


def follow(services: Services, has_round: Callable[[], bool], say: Callable[[str], object]) -> None:
    """Say what dies and is started again, kill what hangs, start again what supervisor has given up, and the gateway
    when there is a round; until Ctrl-C, or until somebody else has stopped supervisord. A question that it did not
    answer is asked again."""
    supervisor, answered, looked = services.connection(), Answered(services.health), time.monotonic()
    known: Mapping[str, int] = {}

    def tell(what: str) -> None:
        with suppress(OSError):  # a disk that is full, or a terminal that is gone, ends no service
            say(what)

    try:
        while True:
            time.sleep(EVERY_SECONDS)
            try:
                # One that supervisor has given up is not among these: it is tried again with the others, and said.
                if known and not known["gateway"] and never_started(supervisor, "gateway") and has_round():
                    with suppress(xmlrpc.client.Fault):  # it is being started again
                        supervisor.startProcess("gateway", False)
                now = dict(pids(supervisor))
                if time.monotonic() - looked > GIVEN_UP_EVERY:
                    looked = time.monotonic()
                    for name in given_up(supervisor):
                        tell(f"{name} failed at every start, and is tried again: its log is {services.log(name)}")
                        supervisor.startProcess(name, False)
            except (OSError, HTTPException, xmlrpc.client.Error) as problem:
                if not running(services.socket):
                    tell("supervisor was stopped, by 'trace-agent down' or otherwise")
                    return
                logger.warning("supervisor or the store did not answer (%s): asking again", problem)
                supervisor = services.connection()
                continue
            for name in (n for n in known if now[n] != known[n]):
                before = "died and " if known[name] else ""
                tell(f"{name} {before}{f'runs as process {now[name]}' if now[name] else 'is started again'}")
            known = now
            for name in answered.hung(now):
                tell(f"{name} lives and has not answered for {SECONDS_TO_HANG:g} s: it is killed, to be started again")
                with suppress(ProcessLookupError):
                    os.killpg(now[name], signal.SIGKILL)
    except KeyboardInterrupt:
        tell("stopping")


class Answered:
    """When each service last answered, by its process. Prefect's worker says itself (503) that it has not asked for
    work for minutes: it hangs, unless that is the doing of a server that is not well. Any other answer is one."""

    def __init__(self, health: Mapping[str, str]) -> None:
        self._health, self._asked = health, float("-inf")
        self._last: dict[str, tuple[int, float]] = {}

    def hung(self, pids: Mapping[str, int]) -> list[str]:
        """Those whose process lives and has not answered for `SECONDS_TO_HANG`. One that never did may be loading a
        large model: it is let."""
        if time.monotonic() - self._asked < ASKED_EVERY:
            return []
        found = {name: status_of(self._health[name]) for name, pid in pids.items() if pid}
        self._asked = now = time.monotonic()
        hung = []
        for name, status in found.items():
            well = status not in (0, 503) if name == "worker" and found.get("prefect") == 200 else status != 0
            pid, since = self._last.get(name, (0, now))
            if well:
                self._last[name] = pids[name], now
            elif pid == pids[name] and now - since > SECONDS_TO_HANG:
                hung.append(name)
                del self._last[name]
        return hung


def pids(supervisor: Any) -> Mapping[str, int]:
    """Process id of each service; 0 of one that does not run."""
    return {info["name"]: info["pid"] for info in supervisor.getAllProcessInfo()}


def given_up(supervisor: Any) -> list[str]:
    """Services that failed so often, one start after the other, that supervisor leaves them down."""
    return [info["name"] for info in supervisor.getAllProcessInfo() if info["statename"] == "FATAL"]


def never_started(supervisor: Any, name: str) -> bool:
    """Whether nobody has started a service yet, or somebody has stopped it."""
    return bool(supervisor.getProcessInfo(name)["statename"] == "STOPPED")


def connect(path: Path) -> Any:
    """supervisord's interface behind a socket."""
    transport = SupervisorTransport(None, None, serverurl=f"unix://{path}")
    return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor


def running(path: Path) -> bool:
    """Whether a supervisord answers on a socket."""
    try:
        return bool(connect(path).getState()["statename"] == "RUNNING")
    except (OSError, HTTPException, xmlrpc.client.Error):
        return False


def stop(path: Path) -> bool:
    """Stop supervisord and all its services, and wait, also where it is stopping already; False when none is there."""
    deadline = time.monotonic() + SECONDS_TO_STOP
    supervisor, there = connect(path), False
    try:
        while time.monotonic() < deadline:
            with suppress(xmlrpc.client.Error):  # it is stopping its services
                supervisor.shutdown()
            there = True
            time.sleep(0.2)
    except (OSError, HTTPException):  # it is gone
        return there
    raise StoreError(f"the services behind {path} did not stop within {SECONDS_TO_STOP:g} s; look at the logs there")


def end(process: subprocess.Popen[bytes], path: Path) -> int:
    """Stop the supervisord that is `process`, and whatever it has started; its exit status. Nothing of it is left, also
    where it does not listen yet, does not stop in time, was killed, or the wait is broken off."""
    try:
        if not stop(path):
            process.terminate()  # it stops what it has started, also while it starts
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
    finally:
        process.kill()
        status = process.wait()
        end_session(process.pid, SECONDS_TO_END)
    return status


def answers(url: str) -> bool:
    """Whether a GET gives 200."""
    return status_of(url) == 200


def status_of(url: str) -> int:
    """The status that a GET gives, 0 when there is no answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=SECONDS_TO_ANSWER) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as problem:
        return problem.code
    except (OSError, HTTPException):
        return 0
