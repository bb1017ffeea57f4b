"""The commands of docker/compose.yaml, run for real on this machine: PostgreSQL, MLflow, Prefect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from tests.db.postgres_server import binaries, running_postgres
from tests.integration.servers import clean_environment, free_port, running, status

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """URL without a database name; the init script of the image has run."""
    with running_postgres() as url:
        with psycopg.connect(f"{url}/postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE trace")
        info = conninfo_to_dict(url)
        subprocess.run(
            [str(ROOT / "docker" / "postgres" / "10-databases.sh")],
            env={
                "PATH": f"{binaries()}:{os.environ['PATH']}",
                "POSTGRES_USER": str(info["user"]),
                "PGHOST": str(info["host"]),
                "PGPORT": str(info["port"]),
                "PGPASSWORD": str(info["password"]),
                "PGDATABASE": "postgres",
            },
            check=True,
            timeout=60,
        )
        yield url


def test_init_script_makes_the_databases(postgres: str) -> None:
    with psycopg.connect(f"{postgres}/postgres") as connection:
        names = {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}
    assert {"trace", "prefect", "mlflow"} <= names


def without_password(url: str, service: dict[str, Any], variable: str, scheme: str) -> dict[str, str]:
    """The environment of a service on the test's server: the password beside the URL, never in it."""
    info, given = conninfo_to_dict(url), service["environment"]
    assert given[variable].startswith(f"{scheme}://trace@postgres:5432/")
    place = f"{scheme}://{info['user']}@{info['host']}:{info['port']}/{given[variable].rsplit('/', 1)[1]}"
    return clean_environment(**given | {variable: place, "PGPASSWORD": str(info["password"])})


def test_mlflow_command_answers_to_its_service_name_and_to_no_other(postgres: str, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", *SERVICES["mlflow"]["command"]]
    replaced = {
        "--host": "--host=127.0.0.1",
        "--port": f"--port={port}",
        "--artifacts-destination": f"--artifacts-destination={tmp_path / 'artifacts'}",
    }
    command = [replaced.get(part.split("=")[0], part) for part in command]
    environment = without_password(postgres, SERVICES["mlflow"], "MLFLOW_BACKEND_STORE_URI", "postgresql+psycopg")
    base = f"http://127.0.0.1:{port}"
    experiments = f"{base}/api/2.0/mlflow/experiments/get?experiment_id=0"
    with running(command, environment, tmp_path / "log", lambda: status(f"{base}/health") == 200):
        assert status(experiments) == 200
        assert status(experiments, host="mlflow:5000") == 200
        assert status(experiments, host="evil.example") == 403


def test_prefect_command_runs_on_its_own_database(postgres: str, tmp_path: Path) -> None:
    port = free_port()
    service = SERVICES["prefect"]
    variable = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
    environment = without_password(postgres, service, variable, "postgresql+asyncpg")
    environment |= {"PREFECT_HOME": str(tmp_path / "home"), "PREFECT_SERVER_API_PORT": str(port)}
    assert service["command"][:2] == ["python", "-m"]
    command = [sys.executable, "-m", *(part.replace("0.0.0.0", "127.0.0.1") for part in service["command"][2:])]
    # Ready, not merely healthy: it answers from its database.
    ready = f"http://127.0.0.1:{port}/api/ready"
    with running(command, environment, tmp_path / "log", lambda: status(ready) == 200):
        assert status(f"http://127.0.0.1:{port}/api/health") == 200
    with psycopg.connect(f"{postgres}/prefect") as connection:
        row = connection.execute("SELECT count(*) FROM alembic_version").fetchone()
    assert row == (1,)
