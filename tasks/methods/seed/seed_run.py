"""One seed of a comparison, opened: its round, its diagnosis, and the homes of methods that need a round of their own.

The seed's own home holds TRACE's round. Every method that takes TRACE's environments or adapters works there; the
others have homes of their own in it, so that they can be played beside it, into which the diagnosis, and other episodes
of the bare base as they are asked for, are copied, so that they are played once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from db import Round, RoundState, open_store
from errors import ConfigurationError
from settings import Settings
from tasks.contrast import contrast
from tasks.methods.seed.budget import Account, Lender
from tasks.rollout import rollout
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import adopt, leave, open_context
from tasks.select import select

DIAGNOSIS = "diagnosis"
KEPT_OPEN = "kept open for the comparison of methods"


@dataclass(frozen=True)
class SeedRun:
    """A seed's own round, the budget of every method in episodes, and what plays a round's stages up to the one named,
    or the gate.
    `points` of a training's checkpoints are measured for the curve over episodes, 0 none."""

    context: Context
    episodes: int
    play_round: Callable[..., None]
    points: int = 0


def open_round(settings: Settings, **shared: Any) -> Context:
    """The one round of a home, begun or resumed, with parts (such as `base`) that this process has loaded already.
    Raises `ConfigurationError` for a home whose round is on other data or settings."""
    context = open_context(settings)
    if context.round.number != 1:
        close_round(context, RoundState.FAILED, "a home of a comparison has one round")
        raise ConfigurationError(
            f"{settings.folder} holds a comparison that was begun on other data or settings; give another home, or "
            "remove that folder"
        )
    context.__dict__.update(shared)
    return context


@contextmanager
def round_beside(settings: Settings) -> Iterator[Context]:
    """The round of a seed's home, which another process may be at work on: to take from it, not to play in it."""
    with open_store(settings.database_url) as store:
        context = adopt(settings, store, min(store.rows(Round), key=lambda row: row.number or 0))
        try:
            yield context
        finally:
            leave(context)


def close_round(
    context: Context,
    state: RoundState = RoundState.INTERRUPTED,
    reason: str = KEPT_OPEN,
    back_to: Context | None = None,
) -> None:
    """Close what a round keeps open. The next command goes on with it; this process may go `back_to` the seed's own,
    which has the same id."""
    context.store.finish_round(context.round.id, state, reason)
    leave(context, back_to)


def pay(context: Context, method: str, episodes: int, inherits: Sequence[str]) -> Account:
    """The account of a method, to which the episodes of a round are charged from now on."""
    account = Account.open(context.store, method, episodes, inherits, lambda: context.spent()["dollars"])
    context.budget = account
    return account


def diagnose(run: SeedRun) -> list[str]:
    """Trajectory ids of the seed's diagnosis: played once, on an account that methods inherit."""
    if played := run.context.found(RolloutResult):
        return played.trajectories
    account = pay(run.context, DIAGNOSIS, run.episodes, ())
    with account.working():
        return rollout.do(run.context).trajectories


def find_lacking(context: Context) -> list[str]:
    """The capabilities that the round selects, in order; the diagnosis is there."""
    contrast.do(context)
    return list(select.do(context).selected)


def solved_at_diagnosis(context: Context) -> pd.DataFrame:
    """Frame (see `outcomes`) of the diagnosis episodes that succeeded, one a task."""
    frame = outcomes(context.store, context.result(RolloutResult).trajectories)
    return frame[frame["success"]].drop_duplicates("task")


def own_home(run: SeedRun, method: str, **changes: Any) -> Context:
    """A round in a home of the method's own, with other settings where `changes` has them. It begins with the seed's
    diagnosis, where that was played, on an account with what that has cost."""
    here = run.context
    context = open_round(
        here.settings.model_copy(update={"home": here.settings.folder / method, **changes}), base=here.base
    )
    played = here.found(RolloutResult)
    if played is None:
        return context
    account = pay(context, DIAGNOSIS, run.episodes, ())
    account.lender = Lender(here.store, context.round.id)
    account.admit(played.trajectories, DIAGNOSIS)
    original = Account(here.store, DIAGNOSIS).row
    context.store.put([replace(account.row, seconds=original.seconds, dollars=original.dollars)], replace=True)
    rollout.do(context)  # everything is stored: nothing is played
    return context
