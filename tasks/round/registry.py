"""The registry of a target's adapters, and what a round's runs are called there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from db import Round, RoundState, StageRow, Store
from environments.contract import content_hash
from errors import StoreError
from models.adapters.failures import came_through_mlflow, causes, may_pass, refused
from models.adapters.registry import RUN_KEY_TAG, Registry, without_password
from settings import Settings

logger = logging.getLogger("trace")

ARTIFACTS = "mlartifacts"
# Characters of a target's name that the registry takes.
LONGEST_NAME = 120
# MLflow's page of a search; a round has a run for itself, and one for each part of it.
MOST_RUNS = 1000
# Clocks of machines in one network are closer than this.
CLOCK = timedelta(seconds=60)
# What a run is then. One that may be resumed is set running by whoever resumes it (`Registry.start_run`).
STATUS: Mapping[RoundState, str] = {RoundState.DONE: "FINISHED", RoundState.FAILED: "FAILED"}


def registry_name(target: str) -> str:
    """A target's name as the registry takes it. Of a long one (a list of families) the beginning stays, and a hash."""
    name = re.sub(r"[:/.,]", "-", target)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{content_hash(target)[:8]}"


def open_registry(settings: Settings, target: str) -> Registry:
    """The registry that holds the adapters of `target`, where the settings say that it is. New files of MLflow are
    put where `files` says if MLflow can write there: to S3, or into a folder."""
    folder = settings.folder / ARTIFACTS
    return Registry(settings.tracking_uri, registry_name(target), folder, artifact_storage(settings))


def artifact_storage(settings: Settings) -> str:
    """The address below which MLflow keeps new files; "" for the home's own folder."""
    kinds = ("s3:", "file:")
    return f"{settings.files.rstrip('/')}/{ARTIFACTS}" if settings.files.startswith(kinds) else ""


def round_key(round_id: str) -> str:
    """What the run of a round is found by."""
    return f"{round_id}-round"


def run_name(target: str, number: int | None, part: str = "") -> str:
    """What a run is called: the target, the night, and the part of it ("": the whole round)."""
    return f"{target} night {number or '?'}{f': {part}' if part else ''}"


def end_runs(registry: Registry, round_id: str, state: RoundState, ended: int | None = None) -> list[str]:
    """End the runs of a round, and of its parts, that are still shown as running, at `ended` milliseconds since 1970
    (now); their ids. `state` is how the round ended: any but done and failed may be resumed, and is KILLED."""
    wanted = f"tags.round = '{round_id}' and attributes.status = 'RUNNING'"
    found = [
        str(run.info.run_id)
        for run in registry.client.search_runs([registry.experiment_id], wanted, max_results=MOST_RUNS)
    ]
    for run in found:
        registry.client.set_terminated(run, STATUS.get(state, "KILLED"), ended)
    return found


def set_aside(registry: Registry, store: Store, this: Round) -> list[str]:
    """Let go of runs that have this round's id, or are the history of all nights, and began before the round did, or
    before the first one of this database: their ids. They are those of a home that was made anew while its MLflow
    stayed, or of another one on the same MLflow. A figure that is logged stays, so theirs would be shown as this
    round's."""
    worked = [row.started_at for row in store.rows(StageRow, round_id=this.id) if row.started_at is not None]
    began = min([this.started_at, *worked])  # the clock may have been set back since the round began
    first = min([began, *(row.started_at for row in store.rows(Round))])
    found = list[str]()
    for wanted, moment in ((f"tags.round = '{this.id}'", began), ("tags.kind = 'history'", first)):
        before = f"attributes.start_time < {int((moment - CLOCK).timestamp() * 1000)}"
        runs = registry.client.search_runs([registry.experiment_id], f"{wanted} and {before}", max_results=MOST_RUNS)
        for run in runs:
            identity, tags = str(run.info.run_id), run.data.tags
            aside = {RUN_KEY_TAG: f"{tags.get(RUN_KEY_TAG, '')}-before-{identity}"}
            aside |= {name: f"{tags[name]}-before" for name in ("round", "kind") if name in tags}
            for name, value in aside.items():
                registry.client.set_tag(identity, name, value)
            found.append(identity)
    if found:
        logger.warning(
            "MLflow has %d runs of another home's round %s, or of this home before it was made anew: they stay as they "
            "are, and this round has runs of its own. One MLflow serves one home",
            len(found),
            this.number,
        )
    return found


MEND = (
    "give a user and a password that it takes (in the address, or as MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD), then run the same command"
)
WAIT = "bring it back (or free its disk), then run the same command, or wait for the next run"
LOOK = "'trace-agent doctor' says how to mend it; then run the same command"


@contextmanager
def mlflow_failures(settings: Settings, what: str) -> Iterator[None]:
    """Within, `what` is done. A failure of MLflow (a full disk, a server that is away) becomes a `StoreError` that may
    pass, with the cause in one line, and so does what will not: a refusal, a database that is damaged or another
    MLflow's. Any other error stays as it is."""
    try:
        yield
    except Exception as problem:
        if not came_through_mlflow(problem):
            raise
        *_, cause = causes(problem)
        passes = may_pass(problem)
        do = WAIT if passes else MEND if refused(problem) else LOOK
        failed = StoreError(
            f"MLflow at {without_password(settings.tracking_uri)} failed while {what}: {type(cause).__name__}: "
            f"{without_password(str(cause).partition(chr(10))[0])}; what is stored stays: {do}"
        )
        failed.transient = passes
        raise failed from None  # MLflow's own words, in a logged traceback, would show the password
