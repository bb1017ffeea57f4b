"""What a process that works on a round counts, for Prometheus: `http://127.0.0.1:PORT/metrics` while it works.

Kept by the process alone: what happened is in the database. `trace_round_progress_timestamp_seconds` moves with each
episode that is stored and each training step: an alert on its age finds a process that hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from models.telemetry.place import Place

logger = logging.getLogger("trace")
SECONDS = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800)


class Played(Protocol):
    """A stored episode, as far as it is counted."""

    @property
    def purpose(self) -> str: ...
    @property
    def success(self) -> bool | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def sampled_tokens(self) -> int: ...


class RoundMetrics:
    """One process's figures. Labels are names of stages, capabilities, targets and purposes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.round = Gauge("trace_round", "Number of the round in work", ("target", "profile"), registry=registry)
        self.working = Gauge(
            "trace_round_stage_working", "1 for the stage in work", ("stage", "capability"), registry=registry
        )
        self.stages = Counter("trace_round_stages", "Stages by how they ended", ("stage", "outcome"), registry=registry)
        self.seconds = Histogram(
            "trace_round_stage_seconds", "Seconds of stages that ended", ("stage",), buckets=SECONDS, registry=registry
        )
        self.episodes = Counter(
            "trace_round_episodes", "Stored episodes by purpose and outcome", ("purpose", "outcome"), registry=registry
        )
        self.tokens = Counter("trace_round_tokens", "Tokens read and sampled", ("kind",), registry=registry)
        self.training = Gauge(
            "trace_round_training", "Step, reward and success of the training", ("capability", "figure"),
            registry=registry,
        )  # fmt: skip
        self.progress = Gauge(
            "trace_round_progress_timestamp_seconds", "Unix time of the last progress", registry=registry
        )

    def began(self, number: int | None, target: str, profile: str) -> None:
        """A round was opened in this process."""
        self.round.clear()
        self.round.labels(target, profile).set(number or 0)
        self.progress.set_to_current_time()

    @contextmanager
    def stage(self, place: Place) -> Iterator[None]:
        """Within the block the process is at a stage, which `done` or `failed`."""
        working, began, outcome = self.working.labels(place.stage, place.capability), time.monotonic(), "failed"
        working.set(1)
        try:
            yield
            outcome = "done"
        finally:
            working.set(0)
            self.stages.labels(place.stage, outcome).inc()
            self.seconds.labels(place.stage).observe(time.monotonic() - began)
            self.progress.set_to_current_time()

    def stored(self, rows: Iterable[Played]) -> None:
        """Episodes were stored."""
        for row in rows:
            outcome = "lost" if row.success is None else "success" if row.success else "failure"
            self.episodes.labels(row.purpose, outcome).inc()
            self.tokens.labels("prompt").inc(row.prompt_tokens)
            self.tokens.labels("sampled").inc(row.sampled_tokens)
        self.progress.set_to_current_time()

    def trained(self, capability: str, step: int, reward: float | None, success: float | None) -> None:
        """A training step was made."""
        for name, value in (("step", step), ("reward", reward), ("success", success)):
            if value is not None:
                self.training.labels(capability, name).set(value)
        self.progress.set_to_current_time()


METRICS = RoundMetrics()
_serving: set[int] = set()


def serve(port: int, metrics: RoundMetrics = METRICS) -> None:
    """Answer `/metrics` on this port of the loopback interface from now on; 0: nowhere. A port that is taken is
    warned of: the round goes on without."""
    if not port or port in _serving:
        return
    try:
        start_http_server(port, "127.0.0.1", metrics.registry)
    except OSError as problem:
        logger.warning(
            "metrics_port = %d cannot be listened on (%s), so this process has no /metrics; the round goes on: give "
            "each process on this machine a port of its own",
            port,
            problem.strerror,
        )
        return
    _serving.add(port)
