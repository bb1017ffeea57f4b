"""Which process is at work on a round, by the leases in the database: who died is told of and taken over from, and who
only waits, for a person or for a training in another process, is neither."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from db import Round, RoundState, StageRow, StageState, Store, open_store
from db.copies import sqlite_file
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
    held = store.held(round_id=round_id)
    return next((row.owner for row in held if row.owner and not is_own_or_ended(row.owner)), None)


def as_told(store: Store, rounds: Sequence[Round]) -> list[Round]:
    """The rounds as people are told of them. One that is stored as running, and whose process left a lease that holds
    no more, was cut off: it is told as interrupted, with that as its reason. One that runs is told without the reason
    why it was stopped before."""
    running = [row.id for row in rounds if row.state == RoundState.RUNNING]
    if not running:
        return list(rounds)
    held = {row.id for row in store.held(round_id=running) if not has_ended(row.owner or "")}
    signs = defaultdict[str, list[StageRow]](list)
    for sign in store.rows(StageRow, round_id=running, state=StageState.RUNNING) + store.presences(round_id=running):
        signs[sign.round_id].append(sign)
    return [_as_told(row, signs[row.id], held) if row.state == RoundState.RUNNING else row for row in rounds]


def _as_told(row: Round, signs: Sequence[StageRow], held: set[str]) -> Round:
    """A round that is stored as running, by the stages and processes that hold or held a lease of it."""
    if not signs or any(sign.id in held for sign in signs):
        return replace(row, reason="")
    last = max((sign.heartbeat_at for sign in signs if sign.heartbeat_at), default=None)
    seen = f", last seen {last:%Y-%m-%d %H:%M} UTC" if last else ""
    reason = f"cut off: its process died{seen}; the same 'trace-agent improve' goes on with it"
    return replace(row, state=RoundState.INTERRUPTED, reason=reason)


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
                logger.info("%s holds vLLM servers; checking whether it is alive", row.owner)
            seen = row.id, row.heartbeat_at
            time.sleep(POLL_SECONDS)


def _training(store: Store) -> StageRow | None:
    """The stage of a training on vLLM servers that another process holds."""
    held = (row for row in store.held() if row.name.startswith("train:") and not is_own_or_ended(row.owner or ""))
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
    return _here(owner) == os.getpid() or has_ended(owner)


def has_ended(owner: str) -> bool:
    """Whether the owner of a claim is a process of this machine that has ended."""
    pid = _here(owner)
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, and is somebody else's
        return False
    return False


def _here(owner: str) -> int | None:
    """The number of the process that owns a claim, where it is of this machine."""
    machine, pid, *_ = [*owner.split(":"), ""]
    return int(pid) if machine == socket.gethostname() and pid.isdecimal() else None
