"""What `trace-agent deploy` refuses before it changes anything on a Prefect server, and what `schedule` leaves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from errors import ConfigurationError, TargetError
from flows import deploy as deploy_file
from flows import schedule as schedule_file
from flows.cli.main import app
from flows.deploy import DEPLOYED, SILENT, SLUG, TAG, deploy
from flows.services import Ports, Services
from settings import load_settings

ROOT = Path(__file__).parents[2]
API, LOCKED = "http://127.0.0.1:4200/api", "http://trace:sesame@127.0.0.1:4200/api"


class Server:
    """Stands for a Prefect server that answers (or does not), with a work pool `trace` of a type."""

    def __init__(self, problem: Exception | None = None, kind: str = "docker") -> None:
        self._problem, self._kind = problem, kind

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None: ...

    def api_healthcheck(self) -> Exception | None:
        return self._problem

    def read_work_pool(self, name: str) -> Any:
        return SimpleNamespace(name=name, type=self._kind)


@pytest.mark.parametrize(
    ("kind", "project", "api", "server", "said"),
    [
        ("processes", ROOT, API, Server(), "type 'processes' have no template here; choose from docker, kubernetes"),
        ("process", ROOT / "tests", API, Server(), "holds no prefect.yaml; run this in the checkout"),
        ("process", ROOT, None, Server(), "no Prefect server is named; set PREFECT_API_URL"),
        ("process", ROOT, API, Server(ConnectionError("refused")), "/api does not answer .ConnectionError.; start it"),
        ("process", ROOT, LOCKED, Server(ConnectionError("refused")), f"server at {API} does not answer"),
        ("process", ROOT, API, Server(), "is of type docker, not process; .*work-pool delete trace"),
    ],
)
def test_what_cannot_be_deployed_is_one_error(
    monkeypatch: pytest.MonkeyPatch, kind: str, project: Path, api: str | None, server: Server, said: str
) -> None:
    monkeypatch.setattr(deploy_file, "get_client", lambda **given: server)
    monkeypatch.setattr(deploy_file, "_deploy_all", lambda *given: pytest.fail("it goes on"))
    with temporary_settings({PREFECT_API_URL: api}), pytest.raises(ConfigurationError, match=said):
        deploy("trace", kind, project)


@pytest.mark.parametrize(
    ("api", "said"),
    [
        (None, r"a schedule needs a Prefect server that lasts.*set PREFECT_API_URL=http://127\.0\.0\.1:4200/api"),
        ("http://127.0.0.1:1/api", r"PREFECT_API_URL = 'http://127\.0\.0\.1:1/api', which does not answer"),
    ],
)
def test_a_schedule_that_could_never_run_a_round_is_refused(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, api: str | None, said: str
) -> None:
    monkeypatch.setattr(schedule_file, "serve", lambda *given, **how: pytest.fail("it is served"))
    with temporary_settings({PREFECT_API_URL: api}), pytest.raises(ConfigurationError, match=said):
        CliRunner().invoke(app, ["schedule"], catch_exceptions=False, env={"PREFECT_API_URL": api})


def test_a_schedule_of_no_target_is_refused(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_file, "serve", lambda *given, **how: pytest.fail("it is served"))
    with pytest.raises(TargetError, match="target 'nope' does not exist"):
        CliRunner().invoke(app, ["schedule", "--target", "nope"], catch_exceptions=False)


@pytest.mark.parametrize("target", ["bfcl:single", None])
def test_the_nights_of_what_was_started_for_a_target_are_on_it(settings_folder: Path, target: str | None) -> None:
    services = Services(load_settings(home=settings_folder), Ports(), target)
    assert services.environment().get("TRACE_TARGET") == target


def test_a_schedule_of_no_time_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_file, "serve", lambda *given, **how: pytest.fail("it is served"))
    with pytest.raises(ConfigurationError, match=r"--cron = 'nonsense': Invalid cron string.*write five fields"):
        schedule_file.serve_schedule("nonsense", "shop", "smoke")


def test_a_schedule_leaves_the_deployment_of_the_work_pool_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect finds a deployment by flow and name: another one of the same name would be taken over, then paused."""
    served: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(schedule_file, "serve", lambda made, **given: served.append((made, given)))
    monkeypatch.setattr(schedule_file, "_asked", lambda: None)
    schedule_file.serve_schedule("0 3 * * *", "shop", "smoke")
    ((made, given),) = served
    assert made.flow_name == "improve"
    assert made.name not in {one["name"] for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert [f"prefect.tag.{tag}" for tag in made.tags] == [TAG]
    assert given["limit"] == 1
    assert given["heartbeat_seconds"] < SILENT.total_seconds() / 2


@pytest.mark.parametrize(
    ("asked", "paused", "served"),
    [
        ((5, 5, 0), False, False),  # it asks again: another one is at work
        ((5, 5, 5), False, True),  # it was killed, and asks no more
        ((90,), False, True),
        ((5, 0), True, True),  # it was stopped
        ((), False, True),  # there was none so far
    ],
)
def test_a_schedule_does_not_take_the_place_of_another(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[int, ...], paused: bool, served: bool
) -> None:
    """One deployment is one target and one time, and Prefect pauses it for both when one of them stops."""
    now, done = schedule_file.utc_now(), []
    moments = iter([now - timedelta(seconds=ago) for ago in asked])

    class Asked(Server):
        def read_deployment_by_name(self, name: str) -> Any:
            assert name == "improve/schedule"
            if not asked:
                raise ObjectNotFound(Exception())
            last.append(next(moments, last[-1]) if last else next(moments))
            return SimpleNamespace(paused=paused, last_polled=last[-1])

    last: list[Any] = []
    monkeypatch.setattr(schedule_file, "get_client", lambda **_: Asked())
    monkeypatch.setattr(schedule_file, "SILENT", timedelta(seconds=5.3))
    monkeypatch.setattr(schedule_file, "ASKED_EVERY", 0.1)
    monkeypatch.setattr(schedule_file, "serve", lambda *made, **given: done.append(made))
    if served:
        schedule_file.serve_schedule("0 3 * * *", "shop", "smoke")
    else:
        with pytest.raises(ConfigurationError, match="another 'trace-agent schedule' serves improve/schedule"):
            schedule_file.serve_schedule("0 3 * * *", "shop", "smoke")
    assert len(done) == served


def test_every_missed_run_is_let_go_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect gives at most so many in one answer, and some of them may be a person's, which stay."""
    runs = [SimpleNamespace(id=i, auto_scheduled=i % 2 == 1, run_count=0) for i in range(9)]
    cancelled: list[int] = []

    class Missed(Server):
        def read_workers_for_work_pool(self, pool: str) -> list[Any]:
            return []

        def read_flow_runs(self, *, limit: int = 4, offset: int = 0, **asked: Any) -> list[Any]:
            return runs[offset : offset + min(limit, 4)]

        def set_flow_run_state(self, run: int, state: Any) -> Any:
            cancelled.append(run)
            return SimpleNamespace(status=deploy_file.SetStateStatus.ACCEPT)

    monkeypatch.setattr(deploy_file, "get_client", lambda **given: Missed())
    assert deploy_file._let_go("trace") == ["4 missed runs of the schedules are not made up for"]
    assert cancelled == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ([("old", None, 1), ("mine", None, 2)], {"old": SLUG, "mine": "added-mine"}),
        ([("mine", None, 2), ("old", None, 1)], {"old": SLUG, "mine": "added-mine"}),
        ([("ours", SLUG, 3), ("mine", None, 4), ("hers", "late", 5)], {"mine": "added-mine"}),
        ([("ours", SLUG, 3)], {}),
        ([], {}),
    ],
)
def test_what_was_paused_or_added_in_prefect_s_pages_outlives_deploy(
    monkeypatch: pytest.MonkeyPatch, there: list[tuple[str, str | None, int]], named: dict[str, str]
) -> None:
    """Prefect updates schedules one by one where each has a slug, there and in the file; else it makes all anew. Each
    `up` deploys, and would let the nights run again that a person has paused."""
    asked: dict[str, Any] = {}

    class Deployed(Server):
        def read_deployment_by_name(self, name: str) -> Any:
            if name != "improve/improve":
                raise ObjectNotFound(KeyError(name))
            schedules = [
                schedule("0 1 * * *", id=i, slug=slug, created=datetime(2026, 1, day, tzinfo=UTC), parameters={"of": i})
                for i, slug, day in there
            ]
            return SimpleNamespace(id="improve", schedules=schedules)

        def update_deployment_schedule(self, deployment: str, schedule: str, **given: Any) -> None:
            assert given["parameters"] == {"of": schedule}, "without them Prefect clears them"
            asked[schedule] = given["slug"]

    monkeypatch.setattr(deploy_file, "get_client", lambda **given: Deployed())
    monkeypatch.setattr(
        deploy_file.subprocess, "run", lambda *given, **how: SimpleNamespace(returncode=1, stdout="", stderr=str(asked))
    )
    with pytest.raises(ConfigurationError, match="'prefect deploy --all' failed") as before_the_file:
        deploy_file._deploy_all("trace", "process", ROOT)
    assert str(before_the_file.value).endswith(f": {named}")


def test_what_prefect_says_against_a_file_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(Server):
        def read_deployment_by_name(self, name: str) -> Any:
            raise ObjectNotFound(KeyError(name))

    said = SimpleNamespace(returncode=1, stdout="", stderr=f"500 for url {LOCKED!r}")
    monkeypatch.setattr(deploy_file, "get_client", lambda **given: Empty())
    monkeypatch.setattr(deploy_file.subprocess, "run", lambda *given, **how: said)
    with pytest.raises(ConfigurationError, match=f"mend what it says: 500 for url {API!r}"):
        deploy_file._deploy_all("trace", "process", ROOT)


def test_what_deploy_takes_back_of_the_file_s_own_schedules_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person gave the nights another time, and parameters, and removed the watch's; housekeeping is paused, which
    Prefect leaves as it is."""
    night = {"target": "tau2:retail"}
    there = {
        "improve": [
            schedule("0 4 * * *", "Europe/Paris", parameters={"params": night}),
            schedule("0 5 * * *", slug="x"),
        ],
        "watch": [],
        "housekeeping": [schedule("0 18 * * 0", active=False)],
    }

    class Deployed(Server):
        def read_deployment_by_name(self, name: str) -> Any:
            return SimpleNamespace(id=name, schedules=there[name.partition("/")[0]])

        def read_deployments(self, **asked: Any) -> list[Any]:
            return [SimpleNamespace(name=name) for name in there]

    def from_the_file(*given: Any, **how: Any) -> Any:
        there["improve"][0] = schedule("0 2 * * *")
        there["watch"] = [schedule("0 12 * * *")]
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(deploy_file, "get_client", lambda **given: Deployed())
    monkeypatch.setattr(deploy_file.subprocess, "run", from_the_file)
    said = deploy_file._deploy_all("trace", "process", ROOT)
    assert said[:3] == [f"deployment {name}/{name}" for name in ("housekeeping", "improve", "watch")]
    instead = "to have another, change it there, or pause it and add one in Prefect's pages"
    assert said[3:] == [
        "schedule of improve/improve: it was '0 4 * * *' Europe/Paris with {'params': {'target': 'tau2:retail'}}, and "
        f"is '0 2 * * *' UTC, as in prefect.yaml; {instead}",
        f"schedule of watch/watch: it was removed, and is '0 12 * * *' UTC, as in prefect.yaml; {instead}",
    ]


def schedule(cron: str, timezone: str = "UTC", slug: str | None = SLUG, **changes: Any) -> Any:
    """A schedule of a deployment as Prefect's server gives it."""
    given = {"schedule": CronSchedule(cron=cron, timezone=timezone), "slug": slug, "parameters": {}} | changes
    return SimpleNamespace(**given)


def test_the_file_says_of_no_schedule_that_it_runs() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert tuple(one["name"] for one in deployments) == DEPLOYED
    for one in deployments:
        assert one["entrypoint"].endswith(f":{one['name']}")
        assert [(s["slug"], "active" in s) for s in one["schedules"]] == [(SLUG, False)]
