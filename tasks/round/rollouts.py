"""A round's rollouts: which episodes it plays, what plays them, and their outcomes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd

from db import Store
from environments.contract import TargetTask
from errors import BudgetExceeded, EpisodesLost, PolicyError, ProviderError
from models.episodes import Episode
from models.scripted import NoopPolicy
from tasks.round.engine import Engine, Playground, PlayOptions, PlayRun
from tasks.unattended.limits import RoundLimits
from tasks.unattended.progress import Stopwatch

logger = logging.getLogger("trace")

# Of a round's episodes only the cap on spending ends the playing: the next call would meet it again.
WITHIN_BUDGET = PlayOptions(fatal=(BudgetExceeded.boundary,))

# Of some episodes the largest share that a server may lose before they say nothing of the policy that played them.
OUTAGE = 0.5
# Tasks that a target may be unable to play to their end without being down: a router may leave an adapter one alone.
UNPLAYABLE = 2


def round_seed(seed: int, number: int) -> int:
    """What decides the draws of a home's round `number` (from 1); round 1 has the seed that was given. No two rounds of
    a seed below 1,000,003 share it, so no two share a scenario seed of training (`models.training.rollouts`)."""
    return seed + 1_000_003 * (number - 1)


def episodes_for(tasks: Sequence[TargetTask], trials: int, seed: int, adapter: str | None = None) -> list[Episode]:
    """One episode per task and trial; `key` is filled in when it is played."""
    return [Episode("", task, seed, trial, adapter) for task in tasks for trial in range(trials)]


class EpisodeBudget(Protocol):
    """Who pays for a round's episodes where methods are compared at equal cost (`tasks/methods/seed/budget.py`)."""

    def admit(self, ids: Sequence[str], purpose: str) -> None:
        """Charge trajectories by id, each once. Raises `EpisodesSpent`, and charges none, when they are too many."""
        ...

    def for_training(self, adapter: str) -> int:
        """The most episodes that the training of an adapter may play in all; the same whenever it is asked."""
        ...

    def unplayed(self, purpose: str) -> int:
        """Episodes of `purpose` that are paid for and not stored: of those that were played when a process died."""
        ...

    def for_routing(self, adapters: Sequence[str], purpose: str) -> int:
        """The most episodes that adapters may play for the router in all; the same whenever it is asked."""
        ...


class Sharing(Protocol):
    """Who lets several processes play what a stage owes (`tasks/shards/sharing.py`)."""

    def play(self, engine: Engine, ground: Playground, episodes: Sequence[Episode], what: str) -> PlayRun | None:
        """Play as `Engine.play` does, with others; None for what this process has to play alone."""
        ...

    def help(self) -> bool:
        """Play what another process owes; False when there was nothing."""
        ...


@dataclass(frozen=True)
class RoundEngine:
    """Plays the episodes of a round under its cap on spending, and adds the seconds that they took to the round's."""

    engine: Engine
    model: Stopwatch
    environment: Stopwatch
    budget: EpisodeBudget | None = None
    limits: RoundLimits | None = None
    sharing: Sharing | None = None

    def play(self, ground: Playground, episodes: Sequence[Episode], what: str = "") -> list[str]:
        """Play the episodes that are not stored, store them, and return all ids in the order of `episodes`.

        Raises `BudgetExceeded` at the first episode whose simulated user may cost no more: what was played is kept;
        `EpisodesSpent` before any is played that the budget does not pay for; and `LimitReached`, before they are
        played or at a batch of them that was stored, where the round has a limit. Where more than OUTAGE of the
        episodes were lost to a server that did not answer, `ProviderError`, or on the target, of more tasks than
        UNPLAYABLE, to anything but the policy itself, `EpisodesLost`; by both the stage is tried again: what follows
        must not rest on the few that are left. Of fewer each is played once more: what took it may be over."""
        if self.limits is not None and self.limits.any and episodes:
            ids = set(self.engine.ids(ground, episodes))
            self.limits.check(len(ids - self.engine.store.stored_ids(ids)))
        if self.budget is not None and episodes:
            self.budget.admit(self.engine.ids(ground, episodes), purpose_of(ground, episodes))
        shared = self.sharing.play(self.engine, ground, episodes, what) if self.sharing is not None else None
        run = self._timed(shared or self.engine.play(ground, episodes, what))
        if run.played and (lost := self._lost(ground, run.ids, what or ground.purpose)):
            told = "%d of %d episodes (%s) were lost to errors, and are played once more"
            logger.info(told, len(lost), len(run.ids), what or ground.purpose)
            again = [e for i, e in zip(run.ids, episodes, strict=True) if i in lost]
            self._timed(self.engine.play(ground, again, f"{what or ground.purpose}, once more"))
        return run.ids

    def _timed(self, run: PlayRun) -> PlayRun:
        self.environment.seconds += run.environment_seconds
        self.model.seconds += run.model_seconds
        if run.stopped:
            raise BudgetExceeded(run.stopped)
        return run

    def _lost(self, ground: Playground, ids: Sequence[str], what: str) -> set[str]:
        """The episodes that were lost to what may pass, where those that are left say something of what played them."""
        frame = self.engine.store.trajectory_frame(
            None, columns=["id", "task_id", "error_boundary", "error"], id=list(ids)
        )
        lost = frame[frame["error_boundary"].notna() & (frame["error_boundary"] != PolicyError.boundary)]
        away = frame[frame["error_boundary"] == ProviderError.boundary]
        after = "what was played is kept, and the same command plays the rest"
        if len(away) > OUTAGE * len(ids):
            raise ProviderError(
                f"{len(away)} of {len(ids)} episodes ({what}) were lost to a server that did not answer; the first: "
                f"{away['error'].iloc[0]}; {after}",
                transient=True,
            )
        # An environment to train on that loses its episodes is judged by that. Doing nothing decides nothing, and may
        # be what the scoring of a target cannot take.
        if ground.environment != self.engine.origin.target or isinstance(self.engine.policy, NoopPolicy):
            return set(away["id"])
        if len(lost) > OUTAGE * len(ids) and lost["task_id"].nunique() > UNPLAYABLE:
            raise EpisodesLost(
                f"{len(lost)} of {len(ids)} episodes ({what}) were lost to errors of the "
                f"{' and the '.join(sorted(set(lost['error_boundary'])))}; the first: {lost['error'].iloc[0]}; {after}"
            )
        return set(lost["id"])


def purpose_of(ground: Playground, episodes: Sequence[Episode]) -> str:
    """What episodes are charged for: those of the test split are measured, whoever plays them."""
    return "test" if all(e.task.split == "test" for e in episodes) else ground.purpose


def success_by_family(store: Store, ids: Sequence[str]) -> dict[str, float]:
    """Share of successes of stored trajectories without errors, by family."""
    rates = outcomes(store, ids).groupby("family")["success"].mean()
    return {str(family): float(rate) for family, rate in rates.items()}


def outcomes(store: Store, ids: Sequence[str], lost: bool = False) -> pd.DataFrame:
    """Frame [id, task, family, trial, success, reward] of stored trajectories without errors, in the order of `ids`;
    with `lost` also those that an error ended, whose success is NaN and whose `error_boundary` says where."""
    frame = store.trajectory_frame(None, id=list(ids))
    frame = frame if lost else frame[frame["error_boundary"].isna()]
    known = set(frame["id"])
    frame = frame.set_index("id").reindex([i for i in ids if i in known]).reset_index()
    found = frame["success"].where(frame["error_boundary"].isna())
    frame["success"] = found.astype(float) if lost else found.astype(bool)
    return frame.rename(columns={"task_id": "task"})
