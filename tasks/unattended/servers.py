"""The servers of Prefect and MLflow that environment and settings name: whether each is there, before work starts.

Both libraries ask a server that is not there again and again, for a minute, and then raise what nobody understands.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.request import getproxies

import httpx
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from db.copies import sqlite_file, sqlite_revision
from errors import ConfigurationError, StoreError
from models.adapters.addresses import REVISION_TABLE
from models.adapters.registry import without_password
from settings import Settings

logger = logging.getLogger("trace")
# How long a server may take to answer.
SECONDS = 5.0
# In a run that a worker began nobody waits for the answer, and a service that died is started again meanwhile.
PATIENCE, EVERY = 120.0, 2.0
BEGUN_BY_WORKER = "PREFECT__FLOW_RUN_ID"
# Where databases are that name no port.
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
EXPERIMENTS = "/api/2.0/mlflow/experiments/search?max_results=1"


@dataclass(frozen=True)
class NamedServer:
    """A server by what names it: its address, where it says that it is well, and what to do if not. `other` is an
    address that every such server has, for one that does not say how it is."""

    name: str
    address: str
    health: str
    do: str
    other: str = ""

    @property
    def shown(self) -> str:
        """The address without a password."""
        return without_password(self.address)


@dataclass(frozen=True)
class Answer:
    """What a server answered: its HTTP status, or 0 and the `problem`; `slow` when it took the call and said nothing
    within `SECONDS`."""

    status: int
    problem: str = ""
    slow: bool = False

    @property
    def well(self) -> bool:
        return self.status == 200

    @property
    def there(self) -> bool:
        """Whether such a server is behind the address. One that is slow, or wants a password, is; one that does not
        know the question is another."""
        return self.slow or (0 < self.status < 500 and self.status != 404)

    def text(self) -> str:
        """As the end of a sentence about the server."""
        return f"answers {self.status}" if self.status else f"does not answer ({self.problem})"


def prefect_server() -> NamedServer | None:
    """The Prefect server that `PREFECT_API_URL` or Prefect's active profile names; None where it runs inside each
    command."""
    named_by, url, instead = "PREFECT_API_URL", os.environ.get("PREFECT_API_URL", ""), "unset PREFECT_API_URL"
    if not url:
        profile, url = _active_profile()
        named_by, instead = f"PREFECT_API_URL of Prefect's profile {profile!r}", "'prefect profile use ephemeral'"
    do = f"start it ('python -m flows.prefect_server'), or {instead}"
    return NamedServer(named_by, url, f"{url.rstrip('/')}/health", do) if url else None


def _active_profile() -> tuple[str, str]:
    """Name and server's address of Prefect's active profile. Read from its file: Prefect's own settings take a second
    to import, and this is asked before anything heavy is."""
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    file = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    try:
        given = tomllib.loads(file.read_text())
        name = os.environ.get("PREFECT_PROFILE") or str(given["active"])
        return name, str(given["profiles"][name].get("PREFECT_API_URL", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or one that Prefect itself refuses
        return "", ""


def mlflow_server(settings: Settings) -> NamedServer | None:
    """The MLflow server that the setting `tracking` names; None where the registry is a file or a database."""
    return mlflow_at(settings.tracking_uri)


def mlflow_at(uri: str) -> NamedServer | None:
    """The MLflow server behind a tracking address; None where that is a file or a database."""
    do = "start it (docs/1-running.md), or correct TRACE_TRACKING"
    if not uri.startswith(("http:", "https:")):
        return None
    base = uri.rstrip("/")
    return NamedServer("tracking (TRACE_TRACKING)", uri, f"{base}/health", do, f"{base}{EXPERIMENTS}")


def check_mlflow(uri: str) -> None:
    """Raise `StoreError` where what is behind a tracking address does not answer within seconds: MLflow itself would
    try for minutes. Of a database's server only the port is asked, and of a file whether it can be read. It is
    transient for a server, which may come back."""
    if (file := sqlite_file(uri) if uri.startswith("sqlite:") else None) is not None:
        if file.exists():
            sqlite_revision(file, REVISION_TABLE)
        return
    server = mlflow_at(uri)
    answer = ask(server) if server else _port_answers(uri)
    if not answer.there:
        away = StoreError(
            f"MLflow at {without_password(uri)} {answer.text()}; the database knows what is live: bring MLflow back, "
            "then run any command"
        )
        away.transient = True  # a round waits for it
        raise away


def _port_answers(uri: str) -> Answer:
    """Whether anything takes a call where a database is to be. An address that names no single host is left to the
    driver."""
    try:
        url = make_url(uri)
        port = url.port or PORTS.get(url.get_backend_name())
        if url.host and "," not in url.host and port is not None:
            socket.create_connection((url.host, port), SECONDS).close()
    except (OSError, ValueError, ArgumentError) as problem:  # the last two are of an address that is none
        return Answer(0, str(problem))
    return Answer(200)


def ask(server: NamedServer) -> Answer:
    """Whether a server is well."""
    answer = _ask(server.health)
    return _ask(server.other) if answer.status == 404 and server.other else answer


def _ask(address: str) -> Answer:
    """What an address answers. A proxy of the environment is for the outside, so it is asked second; an error that
    comes through it may be the proxy's own."""
    first = _asked(address, through_proxy=False)
    if first.status or first.slow or not getproxies():
        return first
    second = _asked(address, through_proxy=True)
    return second if second.well else first


def _asked(address: str, through_proxy: bool) -> Answer:
    try:
        with httpx.Client(timeout=SECONDS, trust_env=through_proxy) as client:
            return Answer(client.get(address).status_code)
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        return Answer(0, str(problem) or type(problem).__name__, isinstance(problem, httpx.ReadTimeout))


def check_servers(settings: Settings) -> None:
    """Raise `ConfigurationError` where Prefect's or MLflow's server is named and nothing is there: after `SECONDS` at
    most, or after `PATIENCE` seconds in a run that a worker began. One that is there and slow is told in the log."""
    # What is no http address needs no server, or is refused by the registry in its own words.
    for server in (prefect_server(), mlflow_server(settings)):
        if server is not None:
            _check(server)


def _check(server: NamedServer) -> None:
    patience = PATIENCE if os.environ.get(BEGUN_BY_WORKER) else 0.0
    deadline = time.monotonic() + patience
    while not (answer := ask(server)).there and time.monotonic() < deadline:
        time.sleep(EVERY)
    if not answer.there:
        raise ConfigurationError(f"{server.name} = {server.shown!r}, which {answer.text()}; {server.do}")
    if answer.slow:
        logger.warning("%s = %s takes longer than %g s to answer", server.name, server.shown, SECONDS)


def check_lasting_prefect() -> None:
    """Raise `ConfigurationError` where no Prefect server is named: the one inside a command runs no schedule."""
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        raise ConfigurationError(
            "a schedule needs a Prefect server that lasts, and PREFECT_API_URL = '' names none; start one ('python -m "
            "flows.prefect_server') and set PREFECT_API_URL=http://127.0.0.1:4200/api, or let 'trace-agent up' run all "
            "of it"
        )
