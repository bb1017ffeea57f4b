"""What `trace-agent deploy` makes of `prefect.yaml` on a real Prefect server, carried out by a real worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deploy import UNBEGUN, ZOMBIES, automations
from tasks.housekeeping.findings import Finding
from tasks.housekeeping.run_checks import scheduled_runs
from tests.db.homes.prefect_homes import prefect_home
from tests.integration.servers import BROWSER, clean_environment, free_port, running, status

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
# A run loads torch and transformers first: a quarter of a minute, and much longer beside heavy work.
SECONDS_TO_END = 480


@dataclass(frozen=True)
class Deployed:
    """A server that knows the deployment, and the environment of its clients."""

    api: str
    environment: dict[str, str]
    rounds: Path

    def prefect(self, *arguments: str) -> str:
        done = subprocess.run(
            [*PREFECT, "--no-prompt", *arguments],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=SECONDS_TO_END, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"prefect {' '.join(arguments)}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
        return done.stdout

    def trace(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "flows.cli.main", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=SECONDS_TO_END, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(f"{self.api}{path}"))

    def post(self, path: str, body: dict[str, Any] | list[Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(f"{self.api}{path}", data=data, headers=headers))

    def ask(self, method: str, path: str, body: dict[str, Any]) -> None:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        self._ask(urllib.request.Request(f"{self.api}{path}", data=data, headers=headers, method=method))

    def _ask(self, request: urllib.request.Request) -> Any:
        """The answer, asked for again while the server's database is busy (503), as Prefect's clients do."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 60
        while True:
            try:
                with opener.open(request, timeout=30) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as problem:
                if problem.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(1)


def looked_at(api: str) -> Finding:
    """What the doctor says of the runs on this server."""
    with temporary_settings({PREFECT_API_URL: api}):
        return scheduled_runs()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder, port, health = tmp_path_factory.mktemp("prefect"), free_port(), free_port()
    rounds = folder / "rounds"
    api = f"http://127.0.0.1:{port}/api"
    environment = clean_environment(
        PREFECT_HOME=prefect_home(folder),
        PREFECT_API_URL=api,
        # Without this the UI asks port 4200, whatever --port says.
        PREFECT_SERVER_API_PORT=str(port),
        PREFECT_WORKER_QUERY_SECONDS="1",
        PREFECT_WORKER_WEBSERVER_HOST="127.0.0.1",
        PREFECT_WORKER_WEBSERVER_PORT=str(health),
        PYTHONPATH=str(ROOT),
        TRACE_PROJECT=str(ROOT),
        TRACE_HOME=str(rounds),
    )
    server = [sys.executable, "-m", "flows.prefect_server", "--port", str(port)]
    worker = [*PREFECT, "worker", "start", "--pool", "trace", "--type", "process", "--with-healthcheck"]
    with ExitStack() as stack:
        stack.enter_context(running(server, environment, folder / "server.log", lambda: status(f"{api}/health") == 200))
        found = Deployed(api, environment, rounds)
        found.trace("deploy")
        # A person adds a time in Prefect's pages, and pauses it.
        kept = found.get("/deployments/name/housekeeping/housekeeping")["id"]
        cron = {"cron": "0 6 * * *", "timezone": "UTC"}
        found.post(f"/deployments/{kept}/schedules", [{"schedule": cron, "active": False}])
        said = found.trace("deploy")  # doing it again changes nothing
        assert said.splitlines() == [
            "work pool trace (process) is up to date",
            *[f"deployment {name}/{name}" for name in ("housekeeping", "improve", "watch")],
            *[f"automation '{name}' is up to date" for name in (ZOMBIES, UNBEGUN)],
        ]
        # The same check as the image's HEALTHCHECK.
        alive = f"http://127.0.0.1:{health}/health"
        assert looked_at(api).said.startswith("nobody asks for runs of housekeeping (never yet), improve (never yet)")
        stack.enter_context(running(worker, environment, folder / "worker.log", lambda: status(alive) == 200))
        yield found


def test_a_triggered_run_completes(deployed: Deployed) -> None:
    state = end_of(deployed, trigger(deployed, "improve", profile="dry"))
    assert (state["type"], state["message"]) == ("COMPLETED", None), state
    # The round went to the store that the worker's environment names.
    assert (deployed.rounds / "trace.db").is_file()


@pytest.fixture(scope="module")
def watched(deployed: Deployed) -> str:
    """The id of a run of the deployment `watch` that found nothing live."""
    run = trigger(deployed, "watch", target="shop")
    state = end_of(deployed, run)
    assert state["type"] == "COMPLETED", state
    return str(run["id"])


def test_a_person_finds_what_a_run_tells_on_its_page(deployed: Deployed, watched: str) -> None:
    if BROWSER is None:
        pytest.skip("no browser is installed; tests/ensure_chromium.sh brings one")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(f"{deployed.api.removesuffix('/api')}/runs/flow-run/{watched}")
        page.locator("#artifacts").click()  # the tab has no role
        page.get_by_text("The live release against what it replaced").first.click()
        page.get_by_text("shop: the bare base answers: there is nothing to watch").wait_for()
        opened.close()


def test_what_people_are_told_is_an_event_of_the_server(deployed: Deployed) -> None:
    """Also where the process that tells it ends at once, as a command does."""
    code = (
        "from settings import load_settings\nfrom tasks.unattended.notices import Notice, notify\n"
        "notify(load_settings(), Notice('fell', 'shop', 'release 2 has fallen', {'points': -12.5}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=deployed.environment, check=True, timeout=SECONDS_TO_END)
    wanted = {"filter": {"event": {"name": ["trace.fell"]}}}
    deadline = time.monotonic() + 60  # the server stores events together, every few seconds
    while not (found := deployed.post("/events/filter", wanted)["events"]) and time.monotonic() < deadline:
        time.sleep(0.2)
    (event,) = found
    assert event["resource"]["prefect.resource.id"] == "trace.target.shop"
    assert event["payload"] == {"text": "release 2 has fallen", "points": -12.5}


def test_a_second_run_on_a_busy_target_has_nothing_to_do(deployed: Deployed, watched: str) -> None:
    """The limit of the target is taken by hand, as by another run, which is under way; the first run made it."""
    deployed.ask("PATCH", "/v2/concurrency_limits/trace-shop", {"active_slots": 1})
    deployment = deployed.get("/deployments/name/improve/improve")
    about = {"flow_id": deployment["flow_id"], "deployment_id": deployment["id"]}
    deployed.post("/flow_runs/", {**about, "state": {"type": "RUNNING"}})
    state = end_of(deployed, trigger(deployed, "watch", target="shop"))
    assert state["type"] == "CANCELLED", state
    assert "another run works on shop" in state["message"]
    deployed.ask("PATCH", "/v2/concurrency_limits/trace-shop", {"active_slots": 0})


def trigger(deployed: Deployed, name: str, **params: Any) -> Any:
    """A run of a deployment."""
    deployment = deployed.get(f"/deployments/name/{name}/{name}")
    return deployed.post(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"params": params}})


def end_of(deployed: Deployed, run: Any) -> Any:
    """The state that a run ends in."""
    deadline = time.monotonic() + SECONDS_TO_END
    state = run["state"]
    while state["type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") and time.monotonic() < deadline:
        time.sleep(1)
        state = deployed.get(f"/flow_runs/{run['id']}")["state"]
    return state


def test_a_run_whose_process_died_is_called_crashed(deployed: Deployed) -> None:
    made = {found["name"]: found for found in deployed.post("/automations/filter", {})}
    assert made.keys() == {ZOMBIES, UNBEGUN}
    for name, within in ((ZOMBIES, 75.0), (UNBEGUN, 300.0)):
        trigger_, (action,) = made[name]["trigger"], made[name]["actions"]
        assert (trigger_["posture"], trigger_["within"], action["state"]) == ("Proactive", within, "CRASHED")
    assert made[ZOMBIES]["trigger"]["after"] == ["prefect.flow-run.heartbeat"]


def test_a_run_whose_worker_died_before_it_began_is_called_crashed_and_no_other(deployed: Deployed) -> None:
    """One that is not of these deployments waits for as long as it likes, and one that runs needs no heartbeat here."""
    with temporary_settings({PREFECT_API_URL: deployed.api}):
        shorter = automations(timedelta(seconds=10))[1].model_copy(update={"name": "for this test"})
        shorter.create()
        flow = deployed.post("/flows/", {"name": "improve"})
        about = {"flow_id": flow["id"], "state": {"type": "SCHEDULED"}}
        run, running_, foreign = (
            deployed.post("/flow_runs/", {**about, "tags": t}) for t in (["trace"], ["trace"], [])
        )
        for handed in (run, running_, foreign):
            deployed.post(f"/flow_runs/{handed['id']}/set_state", {"state": {"type": "PENDING", "name": "Submitting"}})
        deployed.post(f"/flow_runs/{running_['id']}/set_state", {"state": {"type": "RUNNING"}})
        ended = end_of(deployed, run)
        left = [deployed.get(f"/flow_runs/{one['id']}")["state"]["type"] for one in (running_, foreign)]
        shorter.delete()
    assert (ended["type"], "did not begin within 10 s" in ended["message"]) == ("CRASHED", True)
    assert left == ["RUNNING", "PENDING"]


def test_the_schedule_is_on_the_server(deployed: Deployed) -> None:
    deployment = deployed.get("/deployments/name/improve/improve")
    (schedule,) = deployment["schedules"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"], schedule["active"]) == (
        "0 2 * * *",
        "UTC",
        True,
    )
    assert deployment["global_concurrency_limit"] is None, "each target has a limit of its own"
    assert deployment["work_pool_name"] == "trace"


def test_a_schedule_that_a_person_made_outlives_the_next_deploy(deployed: Deployed) -> None:
    schedules = deployed.get("/deployments/name/housekeeping/housekeeping")["schedules"]
    assert {s["schedule"]["cron"]: s["active"] for s in schedules} == {"0 18 * * 0": True, "0 6 * * *": False}


def test_the_doctor_sees_the_worker_that_asks_for_runs(deployed: Deployed) -> None:
    deadline = time.monotonic() + 60
    while (found := looked_at(deployed.api)).level == "warning" and time.monotonic() < deadline:
        time.sleep(1)  # it has not asked yet
    assert found.said == "housekeeping is scheduled; improve is scheduled; watch is scheduled"


def test_the_schedules_make_runs(deployed: Deployed) -> None:
    """They did not, with the pinned Prefect and SQLAlchemy, and nobody was told (`flows/prefect_server.py`)."""
    deadline = time.monotonic() + 60
    scheduled: set[str] = set()
    while scheduled != {"improve", "watch", "housekeeping"} and time.monotonic() < deadline:
        time.sleep(0.5)
        runs = deployed.post("/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}})
        names = {f["id"]: f["name"] for f in deployed.post("/flows/filter", {})}
        scheduled = {names[run["flow_id"]] for run in runs if run["auto_scheduled"]}
    assert scheduled == {"improve", "watch", "housekeeping"}


def test_the_form_refuses_an_impossible_parameter(deployed: Deployed) -> None:
    deployment = deployed.get("/deployments/name/improve/improve")
    with pytest.raises(urllib.error.HTTPError) as refused:
        deployed.post(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"params": {"seed": "many"}}})
    assert refused.value.code in (409, 422)
