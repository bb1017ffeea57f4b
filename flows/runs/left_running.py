"""Runs of processes that were killed. A process that is killed tells nobody: Prefect would show its flow run as Running
for ever, MLflow its run. The next process of the home says so in both, of those that are provably gone: processes of
this machine that have ended. Whoever lives, or is of another machine, is let alone; that machine tells of its own.

What a process is shown as stands in the store, with its presence (`db.ledger.Presence`): where nobody was killed, a
look at that table is all this takes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Crashed

from db import Round, StageRow, Store, open_store
from db.copies import sqlite_file
from errors import StoreError
from models.adapters.registry import without_password
from settings import Settings
from tasks.round.registry import end_runs, mlflow_failures, open_registry
from tasks.unattended.alive import LEASE_SECONDS, has_ended

logger = logging.getLogger("trace")
# The key, in what a presence is shown as, of its run in Prefect.
FLOW_RUN = "flow_run"
# States that end only by the run's own process.
OPEN = [StateType.RUNNING, StateType.PAUSED]


def shown_as() -> dict[str, str]:
    """Where this process is seen at work besides the store: its run in Prefect, "" outside of one."""
    return {FLOW_RUN: flow_run.id or ""}


@contextmanager
def left_runs_ended(settings: Settings, store: Store, own_round: str) -> Iterator[None]:
    """`end_left_runs`, and once more, within the block, when the lease of a process has run out that has only just been
    killed."""
    timer = None
    if end_left_runs(settings, store, own_round):
        timer = threading.Timer(LEASE_SECONDS + 1, end_left_runs, (settings, store, own_round))
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()


def end_left_runs(settings: Settings, store: Store, own_round: str = "") -> bool:
    """Show as ended what processes that were killed have left as running: their flow runs in Prefect as Crashed, and in
    MLflow the runs of rounds on which nobody is at work any more. `own_round` is the id of this process's round; its
    run in MLflow is left alone. What a server cannot be told now, the next process tells it; no round waits for that,
    or ends by it. True where the lease of one still holds: two machines may have one name, and then it may live."""
    ended = [row for row in store.presences() if row.result is not None and has_ended(row.owner or "")]
    if not ended:
        return False
    held = {row.id: row for row in store.held()}
    dead = [row for row in ended if row.id not in held]
    if not dead:
        return True
    at_work = {row.round_id for row in held.values()}
    try:
        _crashed(dead)
        for round_id in sorted({row.round_id for row in dead} - at_work - {own_round}):
            _killed(settings, store.round(round_id), [row for row in dead if row.round_id == round_id])
    except Exception as problem:  # servers that are away, of whatever library
        why = without_password(str(problem))
        logger.warning("processes that were killed are still shown as running (%s: %s)", type(problem).__name__, why)
        return False
    for row in dead:
        # A training in a process of its own may outlive the round's process.
        if row.round_id == own_round or row.round_id not in at_work:
            store.presence_told(row.id)
    return len(dead) < len(ended)


def end_left_runs_of(settings: Settings) -> None:
    """`end_left_runs` of a home in which this process opens no round, where one was."""
    file = sqlite_file(settings.database_url)
    if file is not None and not file.is_file():
        return
    try:
        with open_store(settings.database_url) as store:
            end_left_runs(settings, store)
    except StoreError as problem:  # as of another version: other commands say what to do
        logger.warning("it is not known whether processes were killed: %s", problem)


def _crashed(dead: Sequence[StageRow]) -> None:
    """Prefect's runs of these processes, where this server knows them. A run that began again since then is that of
    another process."""
    beats = {UUID(row.result[FLOW_RUN]): row for row in dead if row.result and row.result.get(FLOW_RUN)}
    beats.pop(UUID(flow_run.id) if flow_run.id else UUID(int=0), None)
    if not beats:
        return
    open_ones = FlowRunFilter(
        id=FlowRunFilterId(any_=list(beats)), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN))
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=open_ones):
            row = beats[run.id]
            if run.state is None or row.heartbeat_at is None or run.state.timestamp > row.heartbeat_at:
                continue
            said = f"its process {row.owner} was killed after {row.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC"
            client.set_flow_run_state(run.id, Crashed(message=said))
            logger.warning("run %s is shown as crashed: %s", run.name, said)


def _killed(settings: Settings, row: Round, dead: Sequence[StageRow]) -> None:
    """MLflow's runs of a round that nobody works on, as of when the last of these processes was seen."""
    file = sqlite_file(settings.tracking_uri) if settings.tracking_uri.startswith("sqlite:") else None
    if file is not None and not file.is_file():  # no round came so far
        return
    seen = max((one.heartbeat_at for one in dead if one.heartbeat_at is not None), default=None)
    with mlflow_failures(settings, f"round {row.number} was looked for"):
        registry = open_registry(settings, row.target)
        ended = end_runs(registry, row.id, row.state, None if seen is None else int(seen.timestamp() * 1000))
    if ended:
        logger.warning(
            "%d runs of round %d, whose process was killed, are shown as ended in MLflow", len(ended), row.number
        )
