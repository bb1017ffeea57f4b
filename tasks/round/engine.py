"""Playing the episodes that are owed and storing them: one engine for rounds, calibrations and evaluations.

A trajectory's id hashes what decides it. What is stored under its id without an error is not played again, so whatever
stopped a run, the same call goes on with the rest. An episode that the infrastructure lost is stored as an error with
its boundary, and is owed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from db import CheckRow, StepRow, Store, TrajectoryRow
from environments.contract import Environment
from models.episodes import Episode, Player, Trajectory, trajectory_id
from models.policy import MessagePolicy, Sampling, TokenPolicy
from models.providers.chat_policy import ChatPolicy, ChatTurns
from models.providers.spending import SpendingCap
from models.renderer import Renderer
from models.telemetry.metrics import METRICS
from tasks.unattended.progress import Meter

logger = logging.getLogger("trace")

# Trajectories written in one transaction, and how long one may wait for it: what a killed process has to play again is
# at most this and what is open.
FLUSH, FLUSH_SECONDS = 16, 2.0


@dataclass(frozen=True)
class Playground:
    """Where episodes are played and how they are stored. `environment` names target or synthesized environment.

    `scope` is what tells the ids of these episodes from those of others on the same task; by default the environment
    and how it is sampled. `of_target`: the environment is the target's own, which any process can make."""

    make: Callable[[], Environment]
    environment: str
    purpose: str
    temperature: float
    max_tokens: int
    adapter_id: str | None = None
    group: str | None = None
    scope: str = ""
    of_target: bool = False

    @property
    def where(self) -> str:
        """What enters every trajectory's id."""
        return self.scope or f"{self.environment}|{self.temperature}|{self.max_tokens}"


@dataclass(frozen=True)
class Origin:
    """Which target's data an episode was played on, and in which round (None: outside of one)."""

    target: str
    data_hash: str
    round_id: str | None = None


@dataclass(frozen=True)
class PlayOptions:
    """How far playing goes. By default every episode is played once, to the end of the list.

    Episodes lost to one of the `passing` boundaries are played up to `tries` times. Playing stops after one lost to a
    `fatal` boundary, and after `lost_in_a_row` (0: never; at least two for each worker) of which the last one is
    `passing`. `workers` episodes are played at once by a policy that is no token policy, each in a thread of its own;
    with 0 nothing is played. Progress shows what has been spent of `cap`; after each batch that was stored `stored` is
    called with its ids, and `flushed`."""

    workers: int = 1
    tries: int = 1
    passing: tuple[str, ...] = ()
    fatal: tuple[str, ...] = ()
    lost_in_a_row: int = 0
    cap: SpendingCap | None = None
    flushed: Callable[[], object] = bool
    stored: Callable[[Sequence[str]], object] = bool

    def reason_to_stop(self, trajectory: Trajectory, lost: int) -> str:
        """Why playing on would be in vain after this trajectory, the last of `lost` in a row; or ""."""
        boundary = trajectory.boundary
        if boundary in self.fatal:
            return trajectory.error
        if self.lost_in_a_row and lost >= max(self.lost_in_a_row, 2 * self.workers) and boundary in self.passing:
            return f"the last {lost} episodes were all lost; the last one to the {boundary}: {trajectory.error}"
        return ""

    def note(self, steps: int) -> str:
        """What progress shows beside the count: the cost where it is capped or counted, else the steps so far."""
        if self.cap is None:
            return f"{steps} steps"
        if not self.cap.spent:
            return ""
        return f"${self.cap.dollars:.4f}" + (
            f" of ${self.cap.limits.dollars:g}" if self.cap.limits.dollars is not None else ""
        )


ONCE = PlayOptions()


@dataclass
class PlayRun:
    """One call of `Engine.play`: the ids of all episodes in their order, how many of them were stored before, how many
    episodes and steps were played, why it stopped early and for which boundary ("" when it did not), and seconds by
    what took them."""

    ids: list[str]
    resumed: int
    played: int = 0
    steps: int = 0
    stopped: str = ""
    stopped_by: str = ""
    model_seconds: float = 0.0
    environment_seconds: float = 0.0


@dataclass(frozen=True)
class _Ended:
    """An episode that ended, with columns that only the policy knows."""

    trajectory: Trajectory
    columns: dict[str, Any] = field(default_factory=dict)
    model_seconds: float = 0.0
    environment_seconds: float = 0.0


@dataclass(frozen=True)
class Engine:
    """Plays `policy` and stores its trajectories in `store`. `renderer` and `window` (episodes open at once) are those
    of a token policy; any other plays its episodes one by one, or in as many threads as `options` has workers. An
    API model always plays in threads."""

    store: Store
    origin: Origin
    policy: TokenPolicy | MessagePolicy
    renderer: Renderer | None = None
    window: int = 1
    options: PlayOptions = ONCE

    def ids(self, ground: Playground, episodes: Sequence[Episode]) -> list[str]:
        """Trajectory ids of episodes under the policy: the same for the same work, wherever and whenever it is done."""
        acting = {adapter: self.policy.identity(adapter) for adapter in {e.adapter for e in episodes}}
        data = self.origin.data_hash
        return [trajectory_id(data, ground.where, e.task, e.seed, e.trial, acting[e.adapter]) for e in episodes]

    def play(self, ground: Playground, episodes: Sequence[Episode], what: str = "") -> PlayRun:
        """Play the episodes that are not stored, and store each as it ends. `what` names the work in progress lines.

        Never raises because of an episode. Whatever else ends it, what was played until then is stored."""
        ids = self.ids(ground, episodes)
        stored = self.store.stored_ids(ids)
        owed = {i: replace(e, key=i) for i, e in zip(ids, episodes, strict=True) if i not in stored}
        if self.options.lost_in_a_row and owed:
            # What was lost before comes last: where a few tasks cannot be played, they stop nobody who comes again.
            before = set(self.store.trajectory_frame(None, columns=["id"], id=list(owed))["id"])
            owed = {i: owed[i] for i in sorted(owed, key=before.__contains__)}
        run = PlayRun(ids, len(stored))
        for attempt in range(self.options.tries if self.options.workers else 0):
            if not owed or run.stopped:
                break
            if attempt:
                logger.info("%d episodes were lost to errors that may pass; playing them once more", len(owed))
            again = self._play_each_once(ground, list(owed.values()), len(owed), what or ground.purpose, run)
            owed = {i: owed[i] for i in again}
        return run

    def play_given(self, ground: Playground, episodes: Iterable[Episode], most: int, what: str) -> PlayRun:
        """Play episodes that have their keys as they are given, at most `most`: the next one is asked for when there is
        room for it. Nothing is looked up; each is played once and stored."""
        run = PlayRun([], 0)
        self._play_each_once(ground, episodes, most, what, run)
        return run

    def _play_each_once(
        self, ground: Playground, episodes: Iterable[Episode], count: int, what: str, run: PlayRun
    ) -> list[str]:
        """Keys of the episodes that were lost to what may pass."""
        options, lost, again, late = self.options, 0, list[str](), list[_Ended]()
        at_once = options.workers if self._threaded else self.window
        # Left in this order: episodes under way end (and cost) first, then what is still unwritten is stored.
        with (
            closing(_Writer(self.store, options)) as writer,
            Meter(what, count, "episodes", at_once=at_once) as meter,
        ):

            def keep(ended: _Ended) -> None:
                writer.add(_with(row_of(ended.trajectory, ground, self.origin), ended.columns))
                run.played += 1
                run.model_seconds += ended.model_seconds
                run.environment_seconds += ended.environment_seconds

            try:
                with closing(self._trajectories(ground, episodes, run, meter, late)) as playing:
                    for ended in playing:
                        trajectory = ended.trajectory
                        keep(ended)
                        lost = lost + 1 if trajectory.boundary else 0
                        if trajectory.boundary in options.passing:
                            again.append(trajectory.episode.key)
                        run.stopped = options.reason_to_stop(trajectory, lost)
                        if run.stopped:
                            run.stopped_by = trajectory.boundary
                            break
                        meter.advance(options.note(run.steps))
            finally:
                for ended in late:
                    keep(ended)
        return again

    @property
    def _threaded(self) -> bool:
        """Whether episodes are played in threads; a token policy batches its episodes itself."""
        if isinstance(self.policy, TokenPolicy):
            return False
        return self.options.workers > 1 or isinstance(self.policy, ChatPolicy)

    def _trajectories(
        self, ground: Playground, episodes: Iterable[Episode], run: PlayRun, meter: Meter, late: list[_Ended]
    ) -> Generator[_Ended]:
        """Episodes as they end; those that end well after the generator was closed are `late`."""
        if self._threaded:
            yield from self._in_threads(ground, episodes, run, late)
            return
        player = Player(ground.make, self.policy, self.renderer, _sampling(ground), self.window)

        def stepped() -> None:
            run.steps += 1
            meter.beat(self.options.note(run.steps))

        player.stepped = stepped
        try:
            for trajectory in player.play(episodes):
                yield _Ended(trajectory)
        finally:
            run.model_seconds += player.policy_seconds
            run.environment_seconds += player.environment_seconds

    def _in_threads(
        self, ground: Playground, episodes: Iterable[Episode], run: PlayRun, late: list[_Ended]
    ) -> Generator[_Ended]:
        """As many episodes at once as there are workers. Closing the generator lets those under way end at their next
        call; what has come to its end by then is paid for, and `late`."""

        def one(episode: Episode) -> _Ended:
            turns = ChatTurns(self.policy) if isinstance(self.policy, ChatPolicy) else self.policy
            player = Player(ground.make, turns, None, _sampling(ground))
            (trajectory,) = player.play([episode])
            if not isinstance(turns, ChatTurns):
                return _Ended(trajectory, {}, player.policy_seconds, player.environment_seconds)
            return _Ended(trajectory, _columns(turns), turns.seconds, player.environment_seconds)

        workers = self.options.workers
        pool, left = ThreadPoolExecutor(workers, "evaluation"), iter(episodes)
        running, done = set[Future[_Ended]](), set[Future[_Ended]]()
        try:
            while True:
                for episode in left:
                    running.add(pool.submit(one, episode))
                    if len(running) >= workers:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                while done:
                    ended = done.pop().result()
                    run.steps += len(ended.trajectory.steps)
                    yield ended
        finally:
            if isinstance(self.policy, ChatPolicy) and running:
                self.policy.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            over = [f.result() for f in (*done, *running) if not f.cancelled() and f.exception() is None]
            late += [ended for ended in over if not ended.trajectory.boundary]
            run.steps += sum(len(ended.trajectory.steps) for ended in late)


class _Writer:
    """Stores trajectories in batches; `close` stores the rest."""

    def __init__(self, store: Store, options: PlayOptions) -> None:
        self.store, self.options = store, options
        self.waiting: list[TrajectoryRow] = []
        self.since = time.monotonic()

    def add(self, row: TrajectoryRow) -> None:
        self.waiting.append(row)
        if len(self.waiting) >= FLUSH or time.monotonic() - self.since >= FLUSH_SECONDS:
            self.close()

    def close(self) -> None:
        self.store.add_trajectories(self.waiting)
        METRICS.stored(self.waiting)
        self.options.stored([row.id for row in self.waiting])
        self.options.flushed()
        self.waiting, self.since = [], time.monotonic()


def _sampling(ground: Playground) -> Sampling:
    return Sampling(ground.temperature, ground.max_tokens)


def _columns(turns: ChatTurns) -> dict[str, Any]:
    """What an API model used for an episode, as columns of its row."""
    used = turns.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "sampled_tokens": used.sampled_tokens,
        "metrics": {"model_calls": used.calls, "model_seconds": round(turns.seconds, 3), "truncated": used.truncated},
    }


def _with(row: TrajectoryRow, columns: dict[str, Any]) -> TrajectoryRow:
    """The row with further columns; metrics are added to its own."""
    return replace(row, **{**columns, "metrics": {**row.metrics, **columns.get("metrics", {})}})


def row_of(trajectory: Trajectory, ground: Playground, at: Origin, row_id: str | None = None) -> TrajectoryRow:
    """What the store keeps of an episode."""
    episode, talk, score = trajectory.episode, trajectory.conversation, trajectory.score
    return TrajectoryRow(
        id=row_id or episode.key,
        round_id=at.round_id,
        purpose=ground.purpose,
        target=at.target,
        data_hash=at.data_hash,
        environment=ground.environment,
        task_id=episode.task.id,
        family=episode.task.family,
        split=episode.task.split,
        seed=episode.seed,
        trial=episode.trial,
        policy_id=trajectory.policy.id,
        base=trajectory.policy.base,
        termination=str(trajectory.termination),
        reward=score.reward if score else None,
        success=score.success if score else None,
        adapter_id=ground.adapter_id if episode.adapter else None,
        group_id=ground.group,
        error_boundary=trajectory.boundary or None,
        error=trajectory.error or None,
        prompt_tokens=len(talk.ids) - trajectory.sampled_tokens,
        sampled_tokens=trajectory.sampled_tokens,
        seconds=trajectory.seconds,
        metrics=dict(score.metrics) if score else {},
        messages=[m.as_dict() for m in trajectory.messages],
        token_ids=talk.ids or None,
        sampled_mask=talk.sampled or None,
        logprobs=talk.logprobs or None,
        steps=[
            StepRow(
                s.action.as_message().as_dict(),
                [m.as_dict() for m in s.observation.messages],
                s.sampled_tokens,
                s.milliseconds,
            )
            for s in trajectory.steps
        ],
        checks=[CheckRow(c.name, c.kind, c.required, c.passed, c.detail) for c in score.checks] if score else [],
    )
