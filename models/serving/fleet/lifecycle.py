"""Which adapters are served, and how they come and go: load, prove, swap, drain, unload.

This is what a gateway asks: a request enters the generation that is served, takes its adapter with `acquire`, and gives
both back with `leave`, so that neither is taken away under it. `models/serving/fleet/fleet.py` is the implementation,
on vLLM servers and on the local model.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from errors import TraceError
from models.serving.fleet.releases import Generation, Standing

logger = logging.getLogger("trace.models")

# How often everything is proven again, and how often it is asked which release is live.
RECONCILE_SECONDS = 60.0
FOLLOW_SECONDS = 2.0


class AdapterState(StrEnum):
    """`live` answers requests; `ready` was proven and waits for the rest of its release; `draining` finishes what it
    has; `refused` failed a check or its proof, `unreachable` has no server that answers: both have a reason."""

    LIVE = "live"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class ServedAdapter:
    """One version as it is served. `name` is what requests call the model (`<capability>@v<version>-<sha8>`, never
    reused); `live_since` is a Unix time, None unless it is live; `replicas` are the addresses of the servers that hold
    it (empty for the local model); `in_flight` counts what was acquired and not released."""

    name: str
    capability: str
    version: str
    digest: str
    state: AdapterState
    live_since: float | None
    reason: str = ""
    replicas: tuple[str, ...] = ()
    in_flight: int = 0


@runtime_checkable
class AdapterFleet(Protocol):
    """Thread-safe. `reconcile` makes what is served equal to the release that is live and proves all of it again;
    `follow` does so only when another release is live (or none was looked for yet) or a name was reported, proves what
    was not proven before, and unloads what is drained. Both return what changed, one line each; one runs at a time.

    `enter` is the generation that is served: it counts the request until `leave`, and what the generation holds stays
    loaded for as long. `acquire` is its adapter of a capability, counted until `leave` is told its name, or None when
    the base has to answer (or the gateway to refuse). `report` tells that a server did not know a name: it is not
    handed out on that replica again before a reconciliation has found it live there."""

    def adapters(self) -> list[ServedAdapter]: ...
    def standing(self) -> Standing: ...
    def reconcile(self) -> list[str]: ...
    def follow(self) -> list[str]: ...
    def enter(self) -> Generation: ...
    def acquire(self, generation: Generation, capability: str) -> ServedAdapter | None: ...
    def leave(self, generation: Generation, name: str = "") -> None: ...
    def report(self, name: str, replica: str = "") -> None: ...
    def replicas(self) -> list[str]: ...


class Reconciler:
    """Follows the live release at once and then every `follow_seconds`, and reconciles every `seconds`, in a thread of
    its own.

    A failure (database, registry or server away) is logged and tried again at the next turn: what is live stays live.
    Use as a context manager, or `start` and `stop`.
    """

    def __init__(
        self, fleet: AdapterFleet, seconds: float = RECONCILE_SECONDS, follow_seconds: float = FOLLOW_SECONDS
    ) -> None:
        self.fleet, self.seconds, self.follow_seconds = fleet, seconds, follow_seconds
        self.problem = ""  # of the last turn, for the health page
        self.turns = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; all that it does runs in the thread."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End after the reconciliation that is running, if any."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Reconciler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        due = time.monotonic() + self.seconds
        while not self._stop.is_set():
            whole = time.monotonic() >= due
            try:
                if whole:
                    due = time.monotonic() + self.seconds
                for change in self.fleet.reconcile() if whole else self.fleet.follow():
                    logger.info("adapters: %s", change)
                self.problem = ""
            except (TraceError, OSError) as problem:
                self._failed(str(problem))
            except Exception as problem:  # if this thread ended, the gateway would follow no release ever again
                self._failed(f"{type(problem).__name__}: {problem}")
                logger.exception("adapters were not reconciled")
            self.turns += 1
            self._stop.wait(min(self.seconds, self.follow_seconds))

    def _failed(self, problem: str) -> None:
        """Logged once for as long as it stays the same."""
        if problem != self.problem:
            logger.error("adapters were not reconciled: %s; what is served stays, and it is tried again", problem)
        self.problem = problem
