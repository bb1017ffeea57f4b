"""Playing what a stage owes with others: this process, those that find the stage held, and workers of a Dask or Ray
cluster. `RoundEngine` asks here first; where episodes are played changes no trajectory, nor its id."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from db import AdapterRow, ShardRow, Shards, Store, row_id
from errors import PolicyError, StoreError, TraceError
from models.episodes import Episode
from tasks.round.context import Context
from tasks.round.engine import Engine, Playground, PlayRun
from tasks.shards.runners import Cluster, open_cluster
from tasks.shards.work import is_carried, works
from tasks.shards.worker import code_fingerprint, play_part, shard_task
from tasks.unattended.alive import has_ended
from tasks.unattended.progress import Meter
from tasks.unattended.stalls import pulse

logger = logging.getLogger("trace")

# Fewer episodes are not worth sharing: they fit into the batches that one process computes at once.
FEWEST = 16
POLL_SECONDS = 0.5
# Between two looks at what is stored of shards that are being played: it is one query for each thousand episodes.
STORED_SECONDS = 10.0
# How often all tasks may end without an episode stored before the round gives up.
BARREN = 3


class SharedPlay:
    """The sharing of one open round. Episodes of environments that were made for training, and of adapters that are not
    stored yet, are not shared: only the process that makes them has them. Nor are those of payloads that JSON does not
    carry: they would be played as something else."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.shards = context.store.shards(context.round.id)
        self._helped: set[str] = set()  # parts, each told once
        self._told: set[str] = set()  # grounds, each told once

    def play(self, engine: Engine, ground: Playground, episodes: Sequence[Episode], what: str) -> PlayRun | None:
        """Play what is owed, shard by shard; None for what this process has to play alone."""
        if len(episodes) < FEWEST or (digest := self._digest(engine, ground, episodes)) is None:
            return None
        ids = engine.ids(ground, episodes)
        stored = self.context.store.stored_ids(ids)
        owed = {i: replace(e, key=i) for i, e in zip(ids, episodes, strict=True) if i not in stored}
        run = PlayRun(ids, len(stored))
        if not owed:
            return run
        part = row_id(self.context.round.id, *ids)
        planned = {e["key"] for row in self.shards.open(part) for e in row.work["episodes"]}
        new = [episode for key, episode in owed.items() if key not in planned]
        if new:
            made = works(ground, new, engine.policy.identity(), digest, self._workers)
            self.shards.owe(part, [(len(work.episodes), work.as_json()) for work in made])
        title = what or ground.purpose
        try:
            self._alone(engine, part, title, run) if self._cluster is None else self._out(engine, part, title, run)
        except BaseException:
            try:
                self.shards.withdraw(part)
            except StoreError as away:  # what ended the work is worth more; whoever takes the stage next plays the part
                logger.warning("%s", away)
            raise
        self.shards.withdraw(part)
        if not run.stopped and (left := self._unplayed(owed)):
            # A process that had this stage before, and ended only now, has withdrawn the part.
            logger.warning("%d episodes of %s were withdrawn by another process, and are played here", len(left), title)
            _add(run, engine.play(ground, left, title))
        return run

    def _unplayed(self, owed: Mapping[str, Episode]) -> list[Episode]:
        """Those of which nothing is stored, not even that they were lost."""
        played = set(self.context.store.trajectory_frame(None, columns=["id"], id=list(owed))["id"])
        return [episode for key, episode in owed.items() if key not in played]

    def help(self) -> bool:
        """Play shards that another process of the round has to have played; False when none is free."""
        free = free_shards(self.shards)
        if not free:
            return False
        part = free[0].part
        if part not in self._helped:
            self._helped.add(part)
            logger.info("playing shards of another process's stage")
        return play_part(self.context, part).played > 0

    def _digest(self, engine: Engine, ground: Playground, episodes: Sequence[Episode]) -> str | None:
        """Digest of the adapter that plays ("": the base); None for what no other process could play."""
        acting = {episode.adapter for episode in episodes}
        if not ground.of_target or engine.renderer is None or len(acting) != 1:
            return None
        (name,) = acting
        if left := [e.task.id for e in episodes if not is_carried(e.task.payload)]:
            if self._cluster is not None and ground.where not in self._told:
                self._told.add(ground.where)
                logger.warning(
                    "task %s has a payload that is no JSON: this process plays it and its like alone", left[0]
                )
            return None
        if name is None:
            return ""
        digest = engine.policy.identity(name).adapter
        row = self.context.store.row(AdapterRow, id=ground.adapter_id) if ground.adapter_id else None
        return digest if row is not None and row.path and row.sha256 == digest else None

    @property
    def _workers(self) -> int:
        return self.context.settings.runner_workers if self._cluster is None else self._cluster.workers

    @property
    def _cluster(self) -> Cluster | None:
        if self.context.settings.runner == "process":
            return None
        return self.context.keep("cluster", lambda: open_cluster(self.context.settings, code_fingerprint()))

    def _alone(self, engine: Engine, part: str, what: str, run: PlayRun) -> None:
        """Play in this process. What another one holds is waited for; what it lets go is played here."""
        while self.shards.open(part) and not run.stopped:
            done = play_part(self.context, part, engine, what)
            _add(run, done)
            if not done.played and not free_shards(self.shards, part):
                pulse()  # whoever plays them has a watch of its own
                engine.options.flushed()
                time.sleep(POLL_SECONDS)

    def _out(self, engine: Engine, part: str, what: str, run: PlayRun) -> None:
        """Have the cluster play, a task a shard; a task also plays the free shards that come after its own."""
        assert self._cluster is not None
        cluster, tasks = self._cluster, list[Any]()
        total = sum(row.episodes for row in self.shards.open(part))
        barren, movement = 0, _Movement(self.context.store)
        with Meter(what, total, "episodes", at_once=engine.window) as meter:
            while left := self.shards.open(part):
                self._show(meter, left, total, movement.seen(left))
                engine.options.flushed()
                tasks, ended = [t for t in tasks if not cluster.done(t)], [t for t in tasks if cluster.done(t)]
                problem = self._collect(ended, run)
                if run.stopped:
                    return
                if problem is not None:
                    barren += 1
                    logger.warning("a shard's task ended: %s; its episodes are owed again", problem)
                    if barren > BARREN * cluster.workers:
                        raise StoreError(
                            f"tasks of {what} ended {barren} times, at last with {type(problem).__name__}: {problem}; "
                            "look at the workers' logs, then run the same command: what is stored is not played again"
                        ) from problem
                if not tasks:
                    tasks = [self._submit(part, what) for _ in free_shards(self.shards, part)]
                time.sleep(POLL_SECONDS)
            for ended_task in tasks:
                cluster.wait(ended_task)
            self._collect(tasks, run)

    def _submit(self, part: str, what: str) -> Any:
        assert self._cluster is not None
        given = {"round_id": self.context.round.id, "part": part, "code": code_fingerprint(), "what": what}
        return self._cluster.submit(shard_task, given)

    def _collect(self, ended: Sequence[Any], run: PlayRun) -> Exception | None:
        """Add what tasks that ended have done. A worker that would not play what was ordered raises; any other problem
        is returned: the shards are owed again."""
        assert self._cluster is not None
        problem: Exception | None = None
        for future in ended:
            try:
                _add(run, PlayRun([], 0, **self._cluster.result(future)))
            except (PolicyError, StoreError) as trouble:
                problem = trouble
            except TraceError:
                raise
            except Exception as trouble:  # whatever the engine says of a worker that died
                problem = trouble
        return problem

    def _show(self, meter: Meter, left: Sequence[ShardRow], total: int, moved: bool) -> None:
        done = total - sum(row.episodes for row in left)
        while meter.done < done:
            meter.advance()
        meter.beat(f"{sum(row.owner is not None for row in left)} shards at work", moved)


class _Movement:
    """Whether the work of others moves. Whoever holds a shard may hang, and prolong its lease all the same: a worker of
    a cluster has no watch of its own."""

    def __init__(self, store: Store) -> None:
        self._store, self._looked = store, float("-inf")
        self._shards: set[tuple[str, str | None]] | None = None
        self._stored = 0

    def seen(self, left: Sequence[ShardRow]) -> bool:
        """Whether, since the last look, a shard was taken or done, or an episode of those that are `left` stored."""
        shards = {(row.id, row.owner) for row in left}
        if shards != self._shards:
            self._shards, self._stored = shards, 0
            return True
        if time.monotonic() - self._looked < STORED_SECONDS:
            return False
        self._looked, before = time.monotonic(), self._stored
        self._stored = len(self._store.stored_ids([e["key"] for row in left for e in row.work["episodes"]]))
        return self._stored > before


def free_shards(shards: Shards, part: str | None = None) -> list[ShardRow]:
    """Those that may be claimed. What a process that has ended held by a clock that was ahead is given back first."""
    free = shards.free(part)
    ended = set() if free else {row.owner for row in shards.ahead(part) if row.owner and has_ended(row.owner)}
    for owner in sorted(ended):
        shards.give_back(owner)
    return shards.free(part) if ended else free


def _add(run: PlayRun, done: PlayRun) -> None:
    run.played += done.played
    run.steps += done.steps
    run.stopped = run.stopped or done.stopped
    run.model_seconds += done.model_seconds
    run.environment_seconds += done.environment_seconds
