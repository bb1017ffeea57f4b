"""The servers that settings and environment name: each answers, or what stands in their place is whole."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import inspect, make_url, text

from db.copies import sqlite_file, sqlite_revision
from db.engine import migration_engine, speaking
from errors import ConfigurationError, TraceError
from models.adapters.addresses import REVISION_TABLE, known_revisions, newest_revision
from models.adapters.registry import without_password
from models.objects import files_of
from models.vllm.server import VllmServer
from settings import Settings
from tasks.housekeeping.findings import Finding, Level, fault, of_error, of_sqlite, refused, well
from tasks.housekeeping.run_checks import scheduled_runs
from tasks.round.policies import open_servers
from tasks.unattended.servers import SECONDS, NamedServer, ask, check_mlflow, mlflow_server, prefect_server


def service_findings(settings: Settings) -> Iterator[Finding]:
    """All checks of this file."""
    server = prefect()
    yield server
    if server.level == Level.OK and prefect_server() is not None:
        yield scheduled_runs()
    yield mlflow(settings)
    if settings.files:
        yield storage(settings)
    if settings.policy.backend == "vllm":
        yield from vllm(settings)


def prefect() -> Finding:
    """The Prefect server, where one is named; else it runs inside each command."""
    server = prefect_server()
    if server is None:
        return well("prefect", "runs inside each command (neither PREFECT_API_URL nor Prefect's profile names one)")
    return _answers("prefect", server)


def storage(settings: Settings) -> Finding:
    """The storage of the home's files: reached, written and read."""
    return refused("files", lambda: files_of(settings).check()) or well("files", f"{settings.files} can be written")


def mlflow(settings: Settings) -> Finding:
    """MLflow's server, its SQLite file or its database: there, whole, and of a schema that the installed MLflow
    opens."""
    server, uri = mlflow_server(settings), settings.tracking_uri
    if server is not None:
        return _answers("mlflow", server)
    file, shown = sqlite_file(uri), without_password(uri)
    if file is None:
        try:
            found = _schema_of_database(uri)
        except TraceError as problem:
            return of_error("mlflow", problem)
        if not found:
            return well("mlflow", f"{shown} answers, and its tables are made by the first round")
    else:
        if not file.is_file():
            return well("mlflow", f"{file} is made by the first round")
        if wrong := of_sqlite("mlflow", file):
            return wrong
        shown, found = str(file), sqlite_revision(file, REVISION_TABLE)
    if found not in known_revisions():
        return fault(
            "mlflow",
            f"{shown} has schema {found!r}, which the installed MLflow does not know",
            "install the MLflow that wrote it, or a newer one",
        )
    if found != newest_revision():
        do = f"back up, then: mlflow db upgrade {without_password(uri)}"
        return fault("mlflow", f"{shown} has schema {found!r}, the installed MLflow needs {newest_revision()!r}", do)
    return well("mlflow", f"{shown}, schema {found}")


def _schema_of_database(uri: str) -> str:
    """The revision of MLflow's schema in a database behind a server; "" where it has none yet. MLflow itself would make
    the tables. Raises `StoreError`, without any password, where it does not answer or lets nobody in, and
    `ConfigurationError` where the driver is missing."""
    check_mlflow(uri)
    url = make_url(uri)
    try:
        engine = migration_engine(url)
    except ImportError as problem:
        raise ConfigurationError(
            f"tracking (TRACE_TRACKING) = {without_password(uri)!r} needs a driver ({problem}); install it"
        ) from None
    with speaking(url), engine.connect() as connection:
        if not inspect(connection).has_table(REVISION_TABLE):
            return ""
        return str(connection.execute(text(f"SELECT version_num FROM {REVISION_TABLE}")).scalar() or "")


def vllm(settings: Settings) -> Iterator[Finding]:
    """Each vLLM server answers under the name of the base."""
    try:
        servers = open_servers(settings, seconds=SECONDS)
    except TraceError as problem:
        yield of_error("vllm", problem)
        return
    for server in servers:
        yield _serves(server, settings.policy.model)
        server.close()


def _serves(server: VllmServer, model: str) -> Finding:
    try:
        names = server.models()
    except TraceError as problem:
        return of_error("vllm", problem)
    if model in names:
        return well("vllm", f"{server.url} serves {model}")
    said = f"{server.url} does not serve {model!r} but {', '.join(sorted(names)) or 'nothing'}"
    return fault("vllm", said, "set policy.model, or start the server with --served-model-name")


def _answers(check: str, server: NamedServer) -> Finding:
    """Whether a server answers with 200."""
    answer, shown = ask(server), without_password(server.health)
    return well(check, f"{shown} answers") if answer.well else fault(check, f"{shown} {answer.text()}", server.do)
