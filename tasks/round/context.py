"""What every stage works with: settings, store, target, base model and registry of one round, opened once a process.

Only ids travel between stages. A task finds its context by the round's id: in the process that opened the round it is
there already, elsewhere it is opened from the environment and the round's stored settings.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from db import Round, Store, open_store
from environments.contract import Target, TargetTask
from errors import ConfigurationError, StoreError
from models.adapters.registry import Registry
from models.local.base import BaseModel, load_base
from models.local.policy import LocalPolicy
from models.providers.analyst import Analyst
from models.providers.analyst_store import StoredReplies, StoredSpend
from models.vllm.policy import VllmPolicy
from settings import Settings, load_settings, writable_folder
from tasks.round.analyst import analyst_settings
from tasks.round.policies import open_policy
from tasks.round.preflight import check_analyst
from tasks.round.registry import registry_name
from tasks.round.traffic import target_named

T = TypeVar("T")
logger = logging.getLogger("trace")

# A stage whose process died is taken over after this long; heartbeats come three times as often.
LEASE_SECONDS = 15.0


@dataclass
class Stopwatch:
    """Adds up the seconds spent inside `with`."""

    seconds: float = 0.0
    _began: float = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


@dataclass
class Context:
    """One open round. `model` and `environment` add up what this process spent in each; what is left of a round's
    wall time is orchestration."""

    settings: Settings
    store: Store
    round: Round
    model: Stopwatch = field(default_factory=Stopwatch)
    environment: Stopwatch = field(default_factory=Stopwatch)
    _kept: dict[str, Any] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def target(self) -> Target:
        return target_named(self.settings.target, self.store)

    @cached_property
    def base(self) -> BaseModel:
        s = self.settings
        return load_base(s.base_model, s.dtype, s.calls, s.rollout.rows, s.cache)

    @cached_property
    def policy(self) -> LocalPolicy | VllmPolicy:
        """What samples; `base.policy` is always the model in this process (training, embedding, routing)."""
        return open_policy(self.settings, self.base)

    @cached_property
    def registry(self) -> Registry:
        return Registry(
            self.settings.tracking_uri, registry_name(self.settings.target), self.settings.folder / "mlartifacts"
        )

    def tasks(self, split: str) -> list[TargetTask]:
        """The split's tasks that this round plays: all, or `rollout.tasks` of them taken at equal distances."""
        found = list(self.target.tasks(split))
        most = self.settings.rollout.tasks or len(found)
        # The middle of each of `most` equal parts: targets list their tasks family by family.
        return found if most >= len(found) else [found[(2 * i + 1) * len(found) // (2 * most)] for i in range(most)]

    @property
    def folder(self) -> Path:
        """Where the round's own files lie."""
        return self.settings.folder / self.round.id

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives: made once, and closed (its `close()`) when the round is let go of."""
        if name not in self._kept:
            made: Any = make()
            self.closing.callback(made.close)
            self._kept[name] = made
        kept: T = self._kept[name]
        return kept

    def stage(self, name: str, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Do a stage once: its stored result if it is done, else claim it, work, and store what came of it."""
        stage = self.store.stage(self.round.id, name)
        waited = 0.0
        while not stage.finished:
            if stage.claim(lease_seconds=LEASE_SECONDS):
                logger.info("stage %s begins", name)
                began = time.perf_counter()
                before = self.model.seconds, self.environment.seconds
                earlier = stage.row().seconds or 0.0
                with stage.working():
                    result = dict(work())
                # What the last attempt spent; what earlier ones did is known by its sum only.
                result["earlier_seconds"] = round(earlier, 3)
                result["peak_gib"] = round(peak_gib(), 3)
                result["model_seconds"] = round(self.model.seconds - before[0], 3)
                result["environment_seconds"] = round(self.environment.seconds - before[1], 3)
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


def open_context(settings: Settings, fresh: bool = False, code_version: str = "") -> Context:
    """Check everything that can be checked before work starts, then start a round or find the one to resume."""
    folder = writable_folder(settings.folder)
    store = open_store(settings.database_url)
    target = target_named(settings.target, store)
    check_analyst(settings, target, store)
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


def current(round_id: str) -> Context:
    """The context of a round, opened if this process has not got it."""
    if round_id not in _OPEN:
        settings = load_settings()
        store = open_store(settings.database_url)
        row = store.round(round_id)
        merged = load_settings(
            **{
                **row.config,
                "home": settings.home,
                "database": settings.database,
                "tracking": settings.tracking,
                "policy": {**settings.policy.model_dump(), **row.config.get("policy", {"backend": "local"})},
            }
        )
        _OPEN[round_id] = Context(merged, store, row)
    return _OPEN[round_id]


def forget(round_id: str) -> None:
    """Drop a round's context from this process: close what it keeps open, take its adapters from the servers."""
    context = _OPEN.pop(round_id, None)
    if context is not None:
        context.closing.close()
        if isinstance(policy := context.__dict__.get("policy"), VllmPolicy):
            policy.close()


def peak_gib() -> float:
    """Peak memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def analyst_of(context: Context) -> Analyst:
    """The round's analyst, opened once and closed with the round."""
    store = context.store

    def make() -> Analyst:
        return Analyst(analyst_settings(context.settings), context.round.id, StoredReplies(store), StoredSpend(store))

    return context.keep("analyst", make)


def spending(context: Context) -> dict[str, float]:
    """Calls, tokens, dollars and seconds that the round's analyst has cost."""
    return {name: round(float(value), 6) for name, value in context.store.spent(context.round.id).items()}
