"""Which adapters are served, and how they come and go: load, probe, route, drain, unload.

This is what a gateway asks: it takes an adapter for a request with `acquire` and gives it back with `release`, so that
no version is unloaded under a request. `models/serving/fleet/fleet.py` is the implementation, on vLLM servers and on
the local model.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from errors import TraceError

logger = logging.getLogger("trace.models")

RECONCILE_SECONDS = 60.0


class AdapterState(StrEnum):
    """`live` answers requests; `draining` finishes those it has; `refused` failed a check or the probe, `unreachable`
    has no server that answers: both have a reason."""

    LIVE = "live"
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
    """Thread-safe. `reconcile` makes what is served equal to the registry's champions and returns what changed, one
    line each; only one runs at a time. `acquire` is the live adapter of a capability, counted as in flight until
    `release`, or None when the base has to answer (or the gateway to refuse). `report` tells that a server did not
    know a name: it is not handed out on that replica again before a reconciliation has found it live there."""

    def adapters(self) -> list[ServedAdapter]: ...
    def reconcile(self) -> list[str]: ...
    def acquire(self, capability: str) -> ServedAdapter | None: ...
    def release(self, name: str) -> None: ...
    def report(self, name: str, replica: str = "") -> None: ...
    def replicas(self) -> list[str]: ...


class Reconciler:
    """Reconciles at once and then every `seconds`, in a thread of its own.

    A failure (registry or server away) is logged and tried again at the next turn: what is live stays live. Use as a
    context manager, or `start` and `stop`.
    """

    def __init__(self, fleet: AdapterFleet, seconds: float = RECONCILE_SECONDS) -> None:
        self.fleet, self.seconds = fleet, seconds
        self.problem = ""  # of the last reconciliation, for the health page
        self.turns = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the first reconciliation runs in the thread."""
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
        while not self._stop.is_set():
            try:
                for change in self.fleet.reconcile():
                    logger.info("adapters: %s", change)
                self.problem = ""
            except (TraceError, OSError) as problem:
                self.problem = str(problem)
                logger.error("adapters were not reconciled: %s; trying again in %.0f s", problem, self.seconds)
            self.turns += 1
            self._stop.wait(self.seconds)
