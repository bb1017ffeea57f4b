"""Which process is at work on a round, by the leases in the database: who died is told of and taken over from, and who
only waits, for a person or for a training in another process, is neither."""

from __future__ import annotations

import logging
import os
import socket
import time

from db import StageRow, StageState, Store, open_store
from db.copies import sqlite_file
from db.engine import database_time
from db.queries import rows
from errors import ServersBusy
from settings import Settings

logger = logging.getLogger("trace")

# A stage whose process died is taken over after this long; heartbeats come three times as often.
LEASE_SECONDS = 15.0
POLL_SECONDS = 1.0


def other_worker(store: Store, round_id: str) -> str | None:
    """The owner of a stage of the round that another living process works on, or of the round itself, which it has
    open; None where there is none. One whose process has ended on this machine keeps its lease for a few seconds, and
    is not alive."""
    held = running(store, round_id=round_id)
    return next((row.owner for row in held if row.owner and not is_own_or_ended(row.owner)), None)


def running(store: Store, **equals: object) -> list[StageRow]:
    """Rows of `stages` whose lease holds, those of processes that have a round open among them."""
    with store.transaction() as connection:
        now = database_time(connection)
        found = rows(connection, StageRow, {**equals, "state": StageState.RUNNING})
    return [row for row in found if row.lease_until and row.lease_until >= now]


def check_nobody_trains(settings: Settings) -> None:
    """Raise `ServersBusy` while another process trains a round of this database on vLLM servers: those that sleep for
    it must not be woken, and are put to sleep under whoever else asks them. One that was killed is waited for until its
    lease has run out. Comparisons of methods, and rounds of other homes, have databases of their own: they are not
    seen."""
    file = sqlite_file(settings.database_url)
    if file is not None and not file.is_file():
        return
    with open_store(settings.database_url) as store:
        seen, until = None, time.monotonic() + 2 * LEASE_SECONDS
        while (row := _training(store)) is not None:
            # A heartbeat since then: it lives. So does who prolongs nothing and whose lease holds all the same.
            if (seen is not None and seen != (row.id, row.heartbeat_at)) or time.monotonic() >= until:
                raise _busy(store, row)
            if seen is None:
                logger.info("%s holds vLLM servers; looking whether it lives", row.owner)
            seen = row.id, row.heartbeat_at
            time.sleep(POLL_SECONDS)


def _training(store: Store) -> StageRow | None:
    """The stage of a training on vLLM servers that another process holds."""
    held = (row for row in running(store) if row.name.startswith("train:") and not is_own_or_ended(row.owner or ""))
    return next((r for r in held if store.round(r.round_id).config.get("policy", {}).get("backend") == "vllm"), None)


def _busy(store: Store, row: StageRow) -> ServersBusy:
    its, capability = store.round(row.round_id), row.name.partition(":")[2]
    return ServersBusy(
        f"round {its.number} on {its.target} trains {capability!r} (process {row.owner}), and with devices.sleep the "
        "vLLM servers sleep for that: they answer nobody else, and woken they would take the memory that it trains in. "
        "Wait until it has ended, or stop that process; then run the same command again"
    )


def is_own_or_ended(owner: str) -> bool:
    """Whether the owner of a claim (`db.ledger.owner_name`) is this process, or one of this machine that has ended."""
    machine, pid, *_ = [*owner.split(":"), ""]
    if machine != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(pid) == os.getpid()
