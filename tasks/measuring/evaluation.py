"""Measuring a policy on a target outside a round: played, stored as it goes, resumed, and summed up with intervals.

An evaluation's id hashes what decides its figures: the target's data, split, trials, seed, simulated user, policy,
sampling and the number of the start. Its episodes are stored as trajectories under that id, so the same command goes on
with what is owed, whatever stopped it. An episode that the infrastructure lost is stored as an error with its boundary,
owed again, and in no denominator.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from db import AdapterRow, SpendRow, Store, TrajectoryRow, row_id
from environments.contract import Target, TargetTask, content_hash
from environments.targets.simulated_user import metered
from errors import ConfigurationError
from models.episodes import Episode, Player, Trajectory, trajectory_id
from models.policy import TokenPolicy
from models.providers.chat_policy import ChatTurns, missing_keys
from models.providers.spending import SpendingCap, Spent
from tasks.measuring.policy_names import LoadedPolicy
from tasks.round.progress import track
from tasks.round.rollouts import Origin, Playground, row_of

logger = logging.getLogger("trace")

FLUSH, FLUSH_SECONDS = 16, 2.0
# Further calls can only fail in the same way.
FATAL = ("configuration", "budget")
# What may go away by itself is played once more in the same run.
PASSING = ("provider", "environment", "sandbox")
# So many lost episodes one after another mean that the provider (or the environment) is down.
LOST_IN_A_ROW = 8
TRIES = 2
MODEL_USER = "litellm:"


@dataclass(frozen=True)
class EvaluationSpec:
    """What is measured. `limit` takes the first tasks of the split only and is no part of the id: a later run without
    it goes on with the others. `start` counts how often the evaluation was begun anew."""

    target: Target
    split: str
    trials: int = 1
    seed: int = 0
    limit: int | None = None
    start: int = 0

    @property
    def user(self) -> str:
        """Who plays the user."""
        return str(getattr(self.target, "user", None) or "none")

    @property
    def tasks(self) -> list[TargetTask]:
        return list(self.target.tasks(self.split))[: self.limit]


@dataclass
class EvaluationRun:
    """One run of an evaluation: what was there, what was played, whether each episode has a result now, and why it
    stopped early ("" when it did not)."""

    id: str
    ids: list[str]
    resumed: int
    played: int = 0
    seconds: float = 0.0
    complete: bool = False
    stopped: str = ""
    answered_by: list[str] = field(default_factory=list)


def evaluation_id(spec: EvaluationSpec, acting: LoadedPolicy) -> str:
    """Hash of everything that decides an evaluation's figures."""
    how = [spec.split, spec.trials, spec.seed, spec.user, acting.sampling.temperature, acting.sampling.max_tokens]
    return content_hash(["evaluation", spec.target.name, spec.target.data_hash, acting.identity.id, *how, spec.start])


def latest(store: Store, spec: EvaluationSpec, acting: LoadedPolicy, fresh: bool) -> EvaluationSpec:
    """The spec with the number of the newest start that is stored, or of the next one when `fresh`."""
    number = 0
    while store.rows(SpendRow, stage=_stage(evaluation_id(replace(spec, start=number), acting))):
        number += 1
    return replace(spec, start=number if fresh or not number else number - 1)


def _stage(identity: str) -> str:
    """The name under which an evaluation's spending is stored."""
    return f"evaluation:{identity}"


def spent_before(store: Store, spec: EvaluationSpec, acting: LoadedPolicy) -> float:
    """Dollars that earlier runs of the evaluation have spent."""
    return store.spent(None, stage=_stage(evaluation_id(spec, acting)))["dollars"]


def run_evaluation(
    store: Store, spec: EvaluationSpec, acting: LoadedPolicy, purse: SpendingCap, workers: int = 1
) -> EvaluationRun:
    """Play what is owed and store it as it ends; see `EvaluationRun`. Never raises because of an episode.

    `workers` episodes are played at once by a policy that is no token policy; with 0 nothing is played."""
    identity, began = evaluation_id(spec, acting), time.monotonic()
    where, policy = f"evaluation:{identity}", acting.identity
    data = spec.target.data_hash
    episodes = {
        trajectory_id(data, where, task, spec.seed, trial, policy): Episode("", task, spec.seed, trial, acting.adapter)
        for task in spec.tasks
        for trial in range(spec.trials)
    }
    run = EvaluationRun(identity, list(episodes), 0)
    run_row = row_id(identity, time.time_ns())

    def put_spent() -> None:
        sums = purse.spent or {acting.identity.base: Spent()}
        store.put([_spend_row(f"{run_row}-{i}", where, m, s) for i, (m, s) in enumerate(sums.items())], replace=True)

    put_spent()
    ground = Playground(
        spec.target.environment, spec.target.name, "evaluation", acting.sampling.temperature,
        acting.sampling.max_tokens, _adapter_row(store, acting), identity,
    )  # fmt: skip
    origin = Origin(spec.target.name, data)
    stored = store.stored_ids(episodes)
    run.resumed = len(stored)
    owed = {i: replace(e, key=i) for i, e in episodes.items() if i not in stored}
    for attempt in range(TRIES):
        if not owed or run.stopped or not workers:
            break
        if attempt:
            logger.info("%d episodes were lost to what may pass; playing them once more", len(owed))
        waiting, lost, again, flushed = list[TrajectoryRow](), 0, list[str](), time.monotonic()
        playing = _play(acting, spec.target, list(owed.values()), purse, workers)
        what = f"{acting.name.text} on {spec.target.name} {spec.split}"
        try:
            for trajectory, extra in track(playing, what, len(owed), "episodes", lambda: _cost_note(purse)):
                row = row_of(trajectory, ground, origin)
                waiting.append(replace(row, **{**extra, "metrics": {**row.metrics, **extra.get("metrics", {})}}))
                run.played += 1
                if len(waiting) >= FLUSH or time.monotonic() - flushed >= FLUSH_SECONDS:
                    store.add_trajectories(waiting)
                    put_spent()
                    waiting, flushed = [], time.monotonic()
                lost = lost + 1 if trajectory.boundary else 0
                if trajectory.boundary in PASSING:
                    again.append(trajectory.episode.key)
                run.stopped = _reason_to_stop(trajectory, lost, workers)
                if run.stopped:
                    break
        finally:  # also when the user stops it: what was played is kept
            playing.close()
            store.add_trajectories(waiting)
            put_spent()
        owed = {i: owed[i] for i in again}
    run.complete = len(store.stored_ids(episodes)) == len(episodes)
    purse.settle()
    run.seconds = time.monotonic() - began
    run.answered_by = sorted(acting.chat.answered_by) if acting.chat else []
    return run


def _reason_to_stop(trajectory: Trajectory, lost: int, workers: int) -> str:
    """Why playing on would be in vain, or ""."""
    if trajectory.boundary in FATAL:
        return trajectory.error
    if lost >= max(LOST_IN_A_ROW, 2 * workers) and trajectory.boundary in PASSING:
        return f"the last {lost} episodes were all lost; the last one to the {trajectory.boundary}: {trajectory.error}"
    return ""


def _adapter_row(store: Store, acting: LoadedPolicy) -> str | None:
    """The adapter as the store knows it, else the name that it is served under."""
    if not (acting.adapter or acting.name.adapter):
        return None
    served = acting.adapter or acting.name.adapter
    capability, _, rest = served.partition("@v")
    version = rest.partition("-")[0]
    rows = store.rows(AdapterRow, registered_version=version) if version else []
    found = [r.id for r in rows if str(r.registered_model).endswith(f"-{capability}")]
    return found[0] if len(found) == 1 else served


def _spend_row(key: str, stage: str, model: str, sums: Spent) -> SpendRow:
    return SpendRow(id=key, stage=stage, model=model, **asdict(sums))


def _cost_note(purse: SpendingCap) -> str:
    if not purse.spent:
        return ""
    return f"${purse.dollars:.4f}" + (f" of ${purse.cap:g}" if purse.cap is not None else "")


Played = tuple[Trajectory, dict[str, Any]]


def _play(
    acting: LoadedPolicy, target: Target, episodes: Sequence[Episode], purse: SpendingCap, workers: int
) -> Generator[Played]:
    """Trajectories as they end, each with further columns of its row."""
    if workers > 1 or acting.chat is not None:
        yield from _in_threads(acting, target, episodes, purse, workers)
        return
    player = Player(target.environment, acting.policy, acting.renderer, acting.sampling, acting.window)
    with metered(purse.user_call):
        for trajectory in player.play(episodes):
            yield trajectory, {}


def _in_threads(
    acting: LoadedPolicy, target: Target, episodes: Sequence[Episode], purse: SpendingCap, workers: int
) -> Generator[Played]:
    """As many episodes at once as there are workers. Closing the generator lets those under way end at their next
    call."""

    def one(episode: Episode) -> Played:
        turns = ChatTurns(acting.chat) if acting.chat is not None else acting.policy
        player = Player(target.environment, turns, None, acting.sampling)
        with metered(purse.user_call):
            (trajectory,) = player.play([episode])
        if not isinstance(turns, ChatTurns):
            return trajectory, {}
        used = turns.usage
        metrics = {"model_calls": used.calls, "model_seconds": round(turns.seconds, 3), "truncated": used.truncated}
        return trajectory, {
            "prompt_tokens": used.prompt_tokens, "sampled_tokens": used.sampled_tokens, "metrics": metrics,
        }  # fmt: skip

    pool, left, running = ThreadPoolExecutor(workers, "evaluation"), iter(episodes), set[Future[Played]]()
    try:
        while True:
            for episode in left:
                running.add(pool.submit(one, episode))
                if len(running) >= workers:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        if acting.chat is not None and running:
            acting.chat.stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def check_user(spec: EvaluationSpec, purse: SpendingCap) -> None:
    """Refuse a simulated user that has no key, or no price that a cap could be held with: `ConfigurationError`."""
    if not spec.user.startswith(MODEL_USER):
        return
    model = spec.user.removeprefix(MODEL_USER)
    missing = missing_keys(model)
    if missing:
        raise ConfigurationError(f"simulated user {model!r} needs {', '.join(missing)}; set it in the environment")
    purse.require_price(model)


def check_context(spec: EvaluationSpec, acting: LoadedPolicy) -> int:
    """Refuse a policy whose context no task's first prompt fits; how many of the tasks do not fit (their episodes are
    stored as errors of the policy before their first token). A token policy's prompts are rendered and counted; an API
    model's are estimated at four characters a token. Nothing is asked of a simulated user that is a model.
    """
    if acting.context is None or spec.user.startswith(MODEL_USER):
        return 0
    needs = []
    for task in spec.tasks:
        environment = spec.target.environment()
        try:
            first = environment.reset(task).messages
            if isinstance(acting.policy, TokenPolicy) and acting.renderer is not None:
                shown = acting.renderer.start(environment.instructions, environment.tools, environment.examples, first)
                need = len(shown.ids)
            else:
                texts = [environment.instructions, *(m.content for m in (*environment.examples, *first))]
                need = (sum(map(len, texts)) + len(json.dumps([dict(t) for t in environment.tools]))) // 4
            needs.append(need + acting.sampling.max_tokens)
        finally:
            environment.close()
    too_long = [need for need in needs if need > acting.context]
    if too_long and len(too_long) == len(needs):
        raise ConfigurationError(
            f"{acting.name.text} has a context of {acting.context} tokens; the first turn of {spec.target.name} needs "
            f"{min(needs)} to {max(needs)}; take a model with a longer context, or lower --max-tokens"
        )
    return len(too_long)
