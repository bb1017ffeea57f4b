"""What a Prefect server has to know before anything runs by itself, made by one command: `trace-agent deploy`.

The work pool with its base job template (`flows/pools/`), the deployments of `prefect.yaml`, and the automations that
call a run crashed whose process died without a word. Doing it again brings all of it up to date.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, StateType, WorkerStatus
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import Cancelled

from db.values.types import utc_now
from errors import ConfigurationError
from models.adapters.registry import without_password

POOLS = Path(__file__).with_name("pools")
KINDS = tuple(sorted(path.stem for path in POOLS.glob("*.json")))
ZOMBIES = "trace: runs whose process died"
# Flow runs send a heartbeat every 30 seconds (prefect.yaml); two and a half of them missed are a death.
SILENT = timedelta(seconds=75)
UNBEGUN = "trace: runs that never began"
# The longest that a run takes from a worker's hands to its first line: a process imports, which takes minutes on a cold
# and busy disk, and elsewhere an image may be pulled first. Too short would end a run that is well.
BEGINS = {"process": timedelta(minutes=5), "docker": timedelta(minutes=15), "kubernetes": timedelta(minutes=30)}
# The deployments of prefect.yaml, each of the flow that has its name, and the slug of the schedule that each has there.
DEPLOYED, SLUG = ("improve", "watch", "housekeeping"), "trace"
# What they are tagged with, and so their runs.
TAG = "prefect.tag.trace"
BEAT = "prefect.flow-run.heartbeat"
ENDS = tuple(f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed"))
# A run of a schedule that nobody has begun for so long is missed.
OVERDUE = timedelta(hours=1)
# The most that Prefect's server gives in one answer, as long as it is not told otherwise.
PAGE = 200
# The checkout inside the image (docker/Dockerfile).
IN_IMAGE = Path("/app")


def deploy(pool: str, kind: str, project: Path) -> list[str]:
    """Make or update pool, deployments and automations; a line for each. Raises `ConfigurationError` when no server is
    named or answers, the pool is of another type, or `project` has no prefect.yaml."""
    if kind not in KINDS:
        raise ConfigurationError(f"work pools of type {kind!r} have no template here; choose from {', '.join(KINDS)}")
    if not (project / "prefect.yaml").is_file():
        raise ConfigurationError(
            f"{project} holds no prefect.yaml; run this in the checkout, or name it with --project"
        )
    api = get_current_settings().api.url
    if not api:
        raise ConfigurationError("no Prefect server is named; set PREFECT_API_URL, such as http://127.0.0.1:4200/api")
    _check_server(api)
    made = [_make_pool(pool, kind), *_deploy_all(pool, kind, project), *map(_make, automations(BEGINS[kind]))]
    return [*made, *_let_go(pool)]


def _check_server(api: str) -> None:
    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise ConfigurationError(
            f"the Prefect server at {without_password(api)} does not answer ({type(problem).__name__}); start it, or "
            "correct PREFECT_API_URL"
        )


def _make_pool(pool: str, kind: str) -> str:
    template = json.loads((POOLS / f"{kind}.json").read_text(encoding="utf-8"))
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(pool)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=pool, type=kind, base_job_template=template))
            return f"work pool {pool} ({kind}) made"
        if found.type != kind:
            raise ConfigurationError(
                f"the work pool {pool!r} is of type {found.type}, not {kind}; give another with --pool, or delete it: "
                f"prefect work-pool delete {pool}"
            )
        client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))
        return f"work pool {pool} ({kind}) is up to date"


def _deploy_all(pool: str, kind: str, project: Path) -> list[str]:
    """`prefect deploy --all`, which alone reads prefect.yaml."""
    _name_schedules()
    before = _file_schedules()
    where = project.resolve() if kind == "process" else IN_IMAGE
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    given = {**os.environ, "TRACE_PROJECT": str(where), "TRACE_POOL": pool}
    done = subprocess.run(command, cwd=project, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        said = without_password(done.stdout + done.stderr)
        raise ConfigurationError(f"'prefect deploy --all' failed in {project}; mend what it says: {said[-2000:]}")
    with get_client(sync_client=True) as client:
        names = sorted(d.name for d in client.read_deployments(work_pool_filter=_named(pool)))
    return [*(f"deployment {name}/{name}" for name in names), *_taken_back(before, _file_schedules())]


def _file_schedules() -> dict[str, str]:
    """When, and with which parameters, the server has the schedules of prefect.yaml, by the deployments that it has.
    Whether they are paused is left out: Prefect leaves that as it is."""
    found: dict[str, str] = {}
    with get_client(sync_client=True) as client:
        for name in DEPLOYED:
            try:
                schedules = client.read_deployment_by_name(f"{name}/{name}").schedules
            except ObjectNotFound:
                continue
            own = next((s for s in schedules if s.slug == SLUG), None)
            found[name] = "removed" if own is None else _shown(own)
    return found


def _shown(one: DeploymentSchedule) -> str:
    when = one.schedule
    if isinstance(when, CronSchedule) and when.day_or:
        text = f"{when.cron!r} {when.timezone}"
    else:
        text = str(when.model_dump(mode="json", exclude_none=True))
    return f"{text} with {one.parameters}" if one.parameters else text


def _taken_back(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What is another now that prefect.yaml was read again: also what a person had changed in Prefect's pages."""
    return [
        f"schedule of {name}/{name}: it was {was}, and is {after[name]}, as in prefect.yaml; to have another, change "
        "it there, or pause it and add one in Prefect's pages"
        for name, was in before.items()
        if name in after and after[name] != was
    ]


def _name_schedules() -> None:
    """Give a slug to each schedule without one. As long as one has none, Prefect makes all of a deployment anew when it
    is updated: what a person has paused would run again, and what was added be gone."""
    with get_client(sync_client=True) as client:
        for name in DEPLOYED:
            try:
                found = client.read_deployment_by_name(f"{name}/{name}")
            except ObjectNotFound:
                continue
            # Earlier versions named none: there the file's is the oldest, for it was made anew before any was added.
            nameless = sorted((s for s in found.schedules if not s.slug), key=lambda s: (s.created is None, s.created))
            slugs = [] if any(s.slug == SLUG for s in found.schedules) else [SLUG]
            slugs += [f"added-{s.id}" for s in nameless[len(slugs) :]]
            for one, slug in zip(nameless, slugs, strict=False):
                # Without parameters Prefect would clear those that it has.
                client.update_deployment_schedule(found.id, one.id, parameters=one.parameters, slug=slug)


def _let_go(pool: str) -> list[str]:
    """Cancel what the schedules wanted while no worker was there: the server inserts runs ahead, and the next worker
    would play the missed nights one after another. Where one is there they wait for what is at work, and stay."""
    late = FlowRunFilter(
        state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Scheduled", "Late"])),
        expected_start_time=FlowRunFilterExpectedStartTime(before_=utc_now() - OVERDUE),
    )
    gone = 0
    with get_client(sync_client=True) as client:
        if any(worker.status == WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(pool)):
            return []
        missed: list[FlowRun] = []
        while page := client.read_flow_runs(
            flow_run_filter=late,
            work_pool_filter=_named(pool),
            sort=FlowRunSort.ID_DESC,
            limit=PAGE,
            offset=len(missed),
        ):
            missed += page
        for run in missed:
            if run.auto_scheduled and not run.run_count:
                said: Any = Cancelled(message="nobody was there to do it when it was due")
                gone += client.set_flow_run_state(run.id, said).status == SetStateStatus.ACCEPT
    return [f"{gone} missed runs of the schedules are not made up for"] if gone else []


def _named(pool: str) -> WorkPoolFilter:
    return WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))


def automations(begins: timedelta) -> tuple[Automation, Automation]:
    """Those that call a run crashed, so that its slot is free again: one that stopped sending its heartbeat, and one
    that was handed to a worker and after `begins` does not run. Whatever else the server runs is let alone: it may send
    no heartbeat, or wait for longer."""
    handed = {f"prefect.flow-run.{state}" for state in ("Pending", "Submitting")}
    went_on = {f"prefect.flow-run.{state}" for state in ("Running", "Scheduled", "AwaitingConcurrencySlot", "Paused")}
    return (
        _crashing(
            ZOMBIES,
            "A run whose process was killed stays in state Running for ever; the round itself goes on.",
            {BEAT},
            {BEAT},
            SILENT,
            f"no heartbeat for {SILENT.seconds} s",
        ),
        _crashing(
            UNBEGUN,
            "A run whose worker was killed before it began stays in state Pending for ever.",
            handed,
            went_on,
            begins,
            f"it was handed to a worker, and did not begin within {begins.seconds} s",
        ),
    )


def _crashing(name: str, why: str, after: set[str], expect: set[str], within: timedelta, said: str) -> Automation:
    """Calls a run crashed that after some event does not send an expected one, nor ends, for so long."""
    return Automation(
        name=name,
        description=why,
        trigger=EventTrigger(
            after=after,
            expect={*expect, *ENDS},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # type: ignore[arg-type]
            match_related={"prefect.resource.role": ["tag"], "prefect.resource.id": [TAG]},  # type: ignore[arg-type]
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=said)],
    )


def _make(automation: Any) -> str:
    try:
        known: Any = Automation.read(name=automation.name)
    except ValueError:
        automation.create()
        return f"automation '{automation.name}' made"
    automation.id = known.id
    automation.update()
    return f"automation '{automation.name}' is up to date"
