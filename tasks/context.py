"""What every stage works with: settings, store, target, base model and registry of one round, opened once a process.

Only ids travel between stages. A task finds its context by the round's id: in the process that opened the round it is
there already, elsewhere it is opened from the environment and the round's stored settings.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from db import Round, Store, open_store
from environments.catalogue import load_target
from environments.contract import Target
from errors import ConfigurationError, StoreError, TraceError
from models.base import BaseModel, check_base, load_base
from models.registry import Registry
from settings import Settings, load_settings, writable_folder
from tasks.traffic import TRAFFIC, TrafficTarget

logger = logging.getLogger("trace")

# A stage whose process died is taken over after this long; heartbeats come three times as often.
LEASE_SECONDS = 15.0
ENVIRONMENT = "environment"  # time spent in environments, as a part of the other stages


@dataclass
class Context:
    """One open round."""

    settings: Settings
    store: Store
    round: Round
    model_seconds: float = 0.0
    environment_seconds: float = 0.0
    _cache: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def target(self) -> Target:
        return target_named(self.settings.target, self.store)

    @cached_property
    def base(self) -> BaseModel:
        s = self.settings
        return load_base(s.base_model, s.dtype, s.calls, s.rollout.rows)

    @cached_property
    def registry(self) -> Registry:
        return Registry(
            self.settings.tracking_uri, registry_name(self.settings.target), self.settings.folder / "mlartifacts"
        )

    @property
    def folder(self) -> Path:
        """Where the round's own files lie."""
        return self.settings.folder / self.round.id

    def stage(self, name: str, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Do a stage once: its stored result if it is done, else claim it, work, and store what came of it."""
        stage = self.store.stage(self.round.id, name)
        waited = 0.0
        while not stage.finished:
            if stage.claim(lease_seconds=LEASE_SECONDS):
                logger.info("stage %s begins", name)
                began = time.perf_counter()
                with stage.working():
                    result = dict(work())
                stage.finish(result)
                logger.info("stage %s done in %.1f s", name, time.perf_counter() - began)
                return result
            if waited > 2 * LEASE_SECONDS:
                owner = stage.row().owner
                raise StoreError(f"stage {name!r} is held by {owner}, which is alive; wait for it or stop that process")
            logger.info("stage %s is claimed; waiting for the lease of whoever holds it to run out", name)
            time.sleep(2.0)
            waited += 2.0
        return dict(stage.row().result or {})


_OPEN: dict[str, Context] = {}


def registry_name(target: str) -> str:
    """A target's name as the registry takes it."""
    return target.replace(":", "-").replace("/", "-").replace(".", "-")


def open_context(settings: Settings, fresh: bool = False, code_version: str = "") -> Context:
    """Check everything that can be checked before work starts, then start a round or find the one to resume."""
    folder = writable_folder(settings.folder)
    store = open_store(settings.database_url)
    target = target_named(settings.target, store)
    config = settings.identity()
    found = None if fresh else store.open_round(settings.target, settings.seed, settings.profile, config)
    if found is not None and found.data_hash != target.data_hash:
        raise ConfigurationError(
            f"round {found.number} was begun on data {found.data_hash}, the target's is now {target.data_hash}; "
            "start another with --fresh"
        )
    current = found or store.start_round(
        settings.target, target.data_hash, settings.seed, settings.profile, config, code_version
    )
    context = Context(settings, store, current)
    (folder / current.id).mkdir(exist_ok=True)
    _OPEN[current.id] = context
    return context


def target_named(name: str, store: Store) -> Target:
    """A target by name; `traffic` is what the store has of users."""
    return TrafficTarget(store) if name == TRAFFIC else load_target(name)


def preflight(settings: Settings) -> None:
    """Everything that can be wrong before a round starts: folder, target, store, base model. One clear error each."""
    writable_folder(settings.folder)
    with open_store(settings.database_url) as store:
        target_named(settings.target, store)
    check_base(settings.base_model)


def current(round_id: str) -> Context:
    """The context of a round, opened if this process has not got it."""
    if round_id not in _OPEN:
        settings = load_settings()
        store = open_store(settings.database_url)
        row = store.round(round_id)
        merged = load_settings(
            **{**row.config, "home": settings.home, "database": settings.database, "tracking": settings.tracking}
        )
        _OPEN[round_id] = Context(merged, store, row)
    return _OPEN[round_id]


def forget(round_id: str) -> None:
    """Drop a round's context from this process."""
    _OPEN.pop(round_id, None)


def peak_gib() -> float:
    """Peak memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Retry condition of all tasks: only what may go away by itself is tried again."""
    try:
        state.result()
    except TraceError as problem:
        return problem.transient
    except (ConnectionError, TimeoutError):
        return True
    except Exception:  # a defect does not go away by itself
        return False
    return False
