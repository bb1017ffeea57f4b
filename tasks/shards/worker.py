"""A worker: claims shards of a part, plays them on its own policy, and says when they are done.

It keeps as many episodes open as it can sample at once, so it claims the next shard before the last one has ended; no
two workers hold the same. Whatever ends it, its shards are owed again: at once when it can still say so, else when
their lease has run out. What it stored counts in any case.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from db import AdapterRow, Store
from db.ledger import owner_name
from errors import AdapterError, ConfigurationError, StoreError
from models.adapters.loading import load_folder
from models.episodes import Episode
from models.local.base import load_renderer
from models.policy import PolicyIdentity, TrainablePolicy
from models.renderer import Renderer
from models.vllm.policy import VllmPolicy
from tasks.round.context import Context
from tasks.round.engine import Engine, PlayRun
from tasks.round.policies import open_remote
from tasks.round.rollouts import WITHIN_BUDGET
from tasks.round.stage import current
from tasks.shards.work import Work

logger = logging.getLogger("trace")

# What a worker that died held is free after so long; heartbeats come three times as often.
LEASE_SECONDS = 15.0
# What a worker runs: a change in any of it may change what is played.
_DEPLOYED = ("db", "environments", "models", "tasks")


@cache
def code_fingerprint() -> str:
    """Hash of the code that plays episodes, and the Python that runs it: equal where equal work is done."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in sorted(path for name in _DEPLOYED for path in (root / name).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_same(theirs: str, where: str) -> None:
    """Raise `ConfigurationError` for a worker whose code is another than this process's."""
    if theirs != code_fingerprint():
        raise ConfigurationError(
            f"{where} runs code {theirs}, this process {code_fingerprint()}: they would not play alike. Install the "
            "same version of trace-agent, on the same Python, on every worker"
        )


class _Claims:
    """The shards that this worker holds. `episodes` claims the next one when it is asked for more than it has."""

    def __init__(self, store: Store, round_id: str, part: str) -> None:
        self.store, self.part, self.owner = store, part, owner_name()
        self.shards = store.shards(round_id)
        self._left: dict[str, set[str]] = {}
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="shards", daemon=True)

    def __enter__(self) -> _Claims:
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._beats.join()
        try:
            self.shards.give_back(self.owner)
        except StoreError as away:  # what ended the work is worth more; the lease decides
            logger.warning("%s", away)

    def claim(self) -> Work | None:
        """The next shard's work, without the episodes that are stored; None when nothing is free."""
        while (row := self.shards.claim(self.part, self.owner, LEASE_SECONDS)) is not None:
            work = Work.from_json(row.work)
            stored = self.store.stored_ids([e.key for e in work.episodes])
            owed = tuple(e for e in work.episodes if e.key not in stored)
            if owed:
                self._left[row.id] = {e.key for e in owed}
                return replace(work, episodes=owed)
            self.shards.finish(row.id, self.owner)
        return None

    def episodes(self, first: Work) -> Iterator[Episode]:
        """The episodes of a claimed shard, and of those after it for as long as some are free."""
        work: Work | None = first
        while work is not None:
            yield from work.episodes
            work = self.claim()

    def stored(self, ids: Sequence[str]) -> None:
        """These trajectories are stored: shards of which nothing is left are done."""
        for shard, left in list(self._left.items()):
            left.difference_update(ids)
            if not left:
                del self._left[shard]
                self.shards.finish(shard, self.owner)

    def _beat(self) -> None:
        while not self._stop.wait(LEASE_SECONDS / 3):
            try:
                self.shards.heartbeat(self.owner, LEASE_SECONDS)
            except StoreError as problem:  # the next beat may come through; else the lease decides
                logger.warning("%s", problem)


def play_part(context: Context, part: str, engine: Engine | None = None, what: str = "") -> PlayRun:
    """Play shards of a part until none is free. `engine` plays the part's policy; None: it is opened as the shard says.

    Raises `ConfigurationError` when this process would not play what was ordered."""
    with _Claims(context.store, context.round.id, part) as claims:
        first = claims.claim()
        if first is None:
            return PlayRun([], 0)
        engine = engine or _engine_for(context, first)
        options = replace(engine.options, stored=claims.stored)
        ground = first.ground(context.target.environment, context.round.target)
        _check_ids(engine, first)
        owed = sum(row.episodes for row in claims.shards.open(part))
        return replace(engine, options=options).play_given(ground, claims.episodes(first), owed, what or first.purpose)


@task(name="shard", task_run_name="shard of {what}", cache_policy=NO_CACHE, retries=0)
def shard_task(round_id: str, part: str, code: str, what: str) -> dict[str, Any]:
    """Play a shard of a part, and those after it that are free. What it took, as JSON."""
    check_same(code, "the flow")
    run = play_part(current(round_id), part, what=what)
    return {
        "played": run.played,
        "steps": run.steps,
        "stopped": run.stopped,
        "model_seconds": run.model_seconds,
        "environment_seconds": run.environment_seconds,
    }


def _engine_for(context: Context, work: Work) -> Engine:
    """What plays a shard in a process that did not order it."""
    policy, renderer = _policy_for(context, work.base)
    if work.adapter is not None:
        _load(context, policy, *work.adapter, work.adapter_id)
    return Engine(context.store, context.origin, policy, renderer, context.settings.open_episodes, WITHIN_BUDGET)


def _policy_for(context: Context, base: PolicyIdentity) -> tuple[TrainablePolicy, Renderer]:
    """The round's policy. On servers only the tokenizer is loaded here, no weights."""
    settings = context.settings
    if settings.policy.backend == "local":
        return context.policy, context.base.renderer
    renderer = load_renderer(settings.base_model, settings.calls, settings.cache)
    identity = replace(base, renderer=renderer.fingerprint)
    policy: VllmPolicy = context.keep("shards", lambda: open_remote(settings, identity, renderer.stop_ids))
    return policy, renderer


def _load(context: Context, policy: TrainablePolicy, name: str, digest: str, adapter_id: str | None) -> None:
    """Make the adapter that acts usable: on servers it is loaded already; in this process its files are needed."""
    if isinstance(policy, VllmPolicy):
        policy.know_adapter(name, digest)
        return
    row = context.store.row(AdapterRow, id=adapter_id)
    folder = context.files.fetch(row.path) if row is not None and row.path else None
    if row is None or folder is None or not folder.is_dir():
        raise AdapterError(
            f"adapter {name!r} should lie under {context.settings.folder}, and does not; a worker that samples by "
            "itself needs the round's home on a disk that it shares, or in object storage (files), or policy.backend = "
            "'vllm'"
        )
    # The shard's name begins with the capability, from which this policy makes the same name again.
    load_folder(policy, folder, name.partition("@")[0], row.round_id, digest)


def _check_ids(engine: Engine, work: Work) -> None:
    """Raise `ConfigurationError` when this process's policy is another than the one whose episodes were ordered."""
    ids = engine.ids(work.ground(None, engine.origin.target), work.episodes)
    if ids != [e.key for e in work.episodes]:
        mine = engine.policy.identity(work.adapter[0] if work.adapter else None)
        raise ConfigurationError(
            f"this worker's policy is {mine}, which is not that of the shard ({work.base}, adapter {work.adapter}); "
            "give every worker the same base model, dtype, tokenizer and trace.toml"
        )
