"""The deployment of `prefect.yaml` on a real Prefect server, carried out by a real worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import clean_environment, free_port, running, status

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]


@dataclass(frozen=True)
class Deployed:
    """A server that knows the deployment, and the environment of its clients."""

    api: str
    environment: dict[str, str]
    rounds: Path

    def prefect(self, *arguments: str) -> str:
        done = subprocess.run(
            [*PREFECT, "--no-prompt", *arguments],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"prefect {' '.join(arguments)}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
        return done.stdout

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(f"{self.api}{path}"))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(f"{self.api}{path}", data=data, headers=headers))

    def _ask(self, request: urllib.request.Request) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder, port, health = tmp_path_factory.mktemp("prefect"), free_port(), free_port()
    rounds = folder / "rounds"
    api = f"http://127.0.0.1:{port}/api"
    environment = clean_environment(
        PREFECT_HOME=str(folder / "home"),
        PREFECT_API_URL=api,
        # Without this the UI asks port 4200, whatever --port says.
        PREFECT_SERVER_API_PORT=str(port),
        PREFECT_WORKER_QUERY_SECONDS="1",
        PREFECT_WORKER_WEBSERVER_HOST="127.0.0.1",
        PREFECT_WORKER_WEBSERVER_PORT=str(health),
        TRACE_PROJECT=str(ROOT),
        TRACE_HOME=str(rounds),
    )
    server = [*PREFECT, "server", "start", "--host", "127.0.0.1"]
    worker = [*PREFECT, "worker", "start", "--pool", "trace", "--type", "process", "--with-healthcheck"]
    with ExitStack() as stack:
        stack.enter_context(running(server, environment, folder / "server.log", lambda: status(f"{api}/health") == 200))
        found = Deployed(api, environment, rounds)
        found.prefect("work-pool", "create", "trace", "--type", "process", "--overwrite")
        found.prefect("deploy", "--all")
        # The same check as the image's HEALTHCHECK.
        alive = f"http://127.0.0.1:{health}/health"
        stack.enter_context(running(worker, environment, folder / "worker.log", lambda: status(alive) == 200))
        yield found


def test_a_triggered_run_completes(deployed: Deployed) -> None:
    deployment = deployed.get("/deployments/name/improve/improve")
    run = deployed.post(
        f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"params": {"profile": "dry"}}}
    )
    deadline = time.monotonic() + 150
    state = run["state"]
    while state["type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") and time.monotonic() < deadline:
        time.sleep(1)
        state = deployed.get(f"/flow_runs/{run['id']}")["state"]
    assert (state["type"], state["message"]) == ("COMPLETED", None), state
    # The round went to the store that the worker's environment names.
    assert (deployed.rounds / "trace.db").is_file()


def test_schedule_and_limit_are_on_the_server(deployed: Deployed) -> None:
    deployment = deployed.get("/deployments/name/improve/improve")
    (schedule,) = deployment["schedules"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"], schedule["active"]) == (
        "0 2 * * *",
        "UTC",
        True,
    )
    assert deployment["global_concurrency_limit"]["limit"] == 1
    assert deployment["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert deployment["work_pool_name"] == "trace"


def test_the_form_refuses_an_impossible_parameter(deployed: Deployed) -> None:
    deployment = deployed.get("/deployments/name/improve/improve")
    with pytest.raises(urllib.error.HTTPError) as refused:
        deployed.post(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"params": {"seed": "many"}}})
    assert refused.value.code in (409, 422)
