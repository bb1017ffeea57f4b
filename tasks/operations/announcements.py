"""What people are told of a round: that it began, what the gate said, and how it ended where it did not go well. A
process that is killed says nothing: the run that goes on with its round does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from db import RoundState
from errors import BudgetExceeded, ConfigurationError, TargetBusy, TraceError
from settings import Settings, load_settings
from tasks.measuring.decisions import GateVerdict
from tasks.round.context import Context
from tasks.unattended.left_behind import other_settings
from tasks.unattended.notices import Kind, Notice, notify
from tasks.unattended.stalls import hung_before


def tell_last_run(settings: Settings, work: str, deaths: Mapping[str, str], hung: Path | None = None) -> None:
    """Announce that the last scheduled run of `work`, which is not a round, hung and left its stacks in `hung`; or that
    it and runs before it died: `deaths` says how, by their ids in Prefect (empty: none died)."""
    target = settings.target
    if hung is not None:
        idle = f"made no progress for {settings.limits.idle_minutes:g} minutes and ended itself"
        notify(settings, Notice("hung", target, f"the last {work} of {target} {idle}; {hung} says where it stood"))
    elif deaths:
        text = f"the last {work} of {target} died: {_ways(deaths)}; this one begins anew"
        notify(settings, Notice("died", target, text, {"runs": list(deaths)}))


@contextmanager
def deaths_announced(settings: Settings, deaths: dict[str, str]) -> Iterator[None]:
    """Within, a run goes as far as its round, and `tell_start` takes its `deaths`: how the scheduled runs just before
    it died, by their ids. It knows whether one of them hung. What nobody has taken is told at the end: a process that
    is killed tells nobody."""
    try:
        yield
    finally:
        if deaths:
            _tell_deaths(settings, deaths)


def _tell_deaths(settings: Settings, deaths: Mapping[str, str]) -> None:
    target = settings.target
    which = "the run before this one" if len(deaths) == 1 else f"the {len(deaths)} runs before this one"
    text = f"{which} on {target} died: {_ways(deaths)}; nothing stored is lost, and this run goes on"
    notify(settings, Notice("died", target, text, {"runs": list(deaths)}))


def tell_start(context: Context, deaths: dict[str, str] | None = None) -> None:
    """Announce that the round begins or goes on, and in one notice that its last process hung, or died. All `deaths`
    that Prefect knows of are told with it, and taken."""
    this, known = context.round, dict(deaths or {})
    if deaths:
        deaths.clear()
    left = hung_before(context.folder)
    if left is not None:
        seen: dict[str, Any] = {"runs": list(known)} if known else {}
        _tell(
            context, "hung",
            f"the last run of round {this.number} on {this.target} made no progress for "
            f"{context.settings.limits.idle_minutes:g} minutes and ended itself; {left} says where it stood"
            + (f" (Prefect saw the end of {_ways(known)})" if known else ""),
            **seen,
        )  # fmt: skip
    elif known:
        _tell_deaths(context.settings, known)
    elif context.left:
        _tell(
            context, "died",
            f"the last run of round {this.number} on {this.target} ended without a word, as one that is killed does; "
            "nothing that it stored is lost, and this run goes on with it",
        )  # fmt: skip
    live = context.parent.number if context.parent else 0
    began, before = f"round {this.number} on {this.target} began", other_settings(context.store, this)
    text = f"{began}; {before}" if before else began
    _tell(context, "started", text, live=live, profile=this.profile)


def tell_failure(context: Context, problem: Exception, state: RoundState) -> None:
    """Announce that an error stopped the round, and whether the next run goes on with it."""
    this = context.round
    kind: Kind = "budget-reached" if isinstance(problem, BudgetExceeded) else "failed"
    said = _said(problem)
    after = "the next run begins another round" if state == RoundState.FAILED else "the next run goes on with it"
    _tell(context, kind, f"round {this.number} on {this.target} was stopped: {said} ({after})", state=str(state))


@contextmanager
def failure_announced(settings: Settings, scheduled: bool, work: str = "") -> Iterator[None]:
    """Within, a scheduled run gets ready for its round, or does `work`. An error that ends it is announced, because
    nobody looks."""
    try:
        yield
    except TargetBusy:  # another run is at work, and tells of it
        raise
    except Exception as problem:
        if scheduled:
            target = settings.target
            ended = f"the {work} of {target} failed" if work else f"a run on {target} ended before it had a round"
            notify(settings, Notice("failed", target, f"{ended}: {_said(problem)} (the next run tries again)"))
        raise


@contextmanager
def settings_announced(scheduled: bool, work: str = "", **place: Any) -> Iterator[None]:
    """Within, a scheduled run reads its settings. What is wrong with the parameters that somebody gave it is announced
    as `failure_announced` does, by the settings of the machine; where these are wrong as well, nobody can be told.
    `place` is the target and the home that are given."""
    try:
        yield
    except ConfigurationError as problem:
        with suppress(ConfigurationError), failure_announced(load_settings(**place), scheduled, work):
            raise problem
        raise


def tell_question(context: Context, release: int) -> None:
    """Announce that the run has paused until a person decides."""
    text = f"release {release} of {context.round.target} waits for approval: open the paused run in Prefect's UI"
    _tell(context, "approval-asked", text, release=release)


def tell_verdict(context: Context, release: int, verdicts: Mapping[str, str], reasons: str) -> None:
    """Announce what the gate said of the candidate `release` (0: there was none): promoted, refused or underpowered.
    Where methods are compared (a round with a budget of its own) nobody is told: what is live there answers nobody."""
    if context.budget is not None:
        return
    this, whole = context.round, verdicts.get("release", "")
    kind: Kind = "refused"
    if whole == GateVerdict.PROMOTED:
        kind = "promoted"
    elif GateVerdict.UNDERPOWERED in ([whole] if whole else verdicts.values()):
        kind = "underpowered"
    subject = f"release {release} of {this.target}" if release else f"round {this.number} on {this.target}"
    said = {"promoted": "is live", "underpowered": "could not be judged", "refused": "changes nothing"}[kind]
    _tell(context, kind, f"{subject} {said}: {reasons}", release=release, verdicts=dict(verdicts))


def _ways(deaths: Mapping[str, str]) -> str:
    return "; ".join(deaths.values())


def _said(problem: Exception) -> str:
    """What is no error of ours may quote anything: its kind is told, log and store have the rest."""
    return str(problem) if isinstance(problem, TraceError) else f"a {type(problem).__name__}"


def _tell(context: Context, kind: Kind, text: str, **details: object) -> None:
    this = context.round
    notify(context.settings, Notice(kind, this.target, text, {"round": this.number, "round_id": this.id, **details}))
