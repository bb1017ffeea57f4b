"""A sample of each training's groups as traces in MLflow: what was asked, each turn and call, reward and checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from db import Store, TrajectoryRow
from models.adapters.registry import Registry
from models.adapters.runs import RunLog
from models.adapters.traces import PlayedSpan, PlayedTrace
from tasks.episodes.groups import Group, training_groups
from tasks.episodes.pages import trained_adapters
from tasks.episodes.shown import Hide, ShownEpisode, ShownTurn, shown_episode
from tasks.reporting.figures import RoundFigures
from tasks.round.results import TrainResult
from tasks.round.stored import StoredRound


def log_traces(registry: Registry, stored: StoredRound, figures: RoundFigures, hide: Hide, each: int) -> int:
    """Log at most `each` episodes of every group that the pages show, from the least rewarded to the most, into the
    run of their training; returns how many. Done again it changes nothing."""
    logged = 0
    for capability, adapter in trained_adapters(stored, figures).items() if each else ():
        found = training_groups(stored.store, stored.round.id, adapter, hide, each=each)
        traces = list(_traces(stored.store, found.groups, capability, hide))
        RunLog(registry, stored.result(TrainResult, capability).run).traces(traces)
        logged += len(traces)
    return logged


def _traces(store: Store, groups: Iterable[Group], capability: str, hide: Hide) -> Iterable[PlayedTrace]:
    of = {e.id: group for group in groups for e in group.episodes}
    for row in store.trajectories(id=list(of)):
        yield trace_of(row, of[row.id], capability, hide)


def trace_of(row: TrajectoryRow, group: Group, capability: str, hide: Hide) -> PlayedTrace:
    """A stored episode as a trace: the turns in their order, a tool's answer below the call it answers."""
    shown = shown_episode(row, hide)
    first = next((t.text for t in shown.turns if t.role == "user"), "")
    missed = sorted(hide(c.name) for c in row.checks if c.required and not c.passed)  # all of them: names are short
    tags = {
        "trajectory": row.id,
        "capability": capability,
        "family": row.family,
        "step": str(group.step),
        "reward": "none" if row.reward is None else f"{row.reward:.4g}",
        "success": "none" if row.success is None else str(row.success).lower(),
        "round": row.round_id or "",
    }
    outcome = {"reward": row.reward, "success": row.success, "termination": row.termination, "checks missed": missed}
    return PlayedTrace(
        key=row.id,
        name=f"{capability}, step {group.step}: {row.task_id}",
        inputs={"task": row.task_id, "asked": first},
        outputs=outcome | ({"error": shown.error} if shown.error else {}),
        spans=tuple(_spans(shown.turns, _carried_out(row, shown))),
        tags=tags,
        session=f"{row.adapter_id or 'base'}/{group.key}",
        ended=int(row.created_at.timestamp() * 1e9),
        seconds=row.seconds,
        failed=row.error_boundary is not None,
    )


def _carried_out(row: TrajectoryRow, shown: ShownEpisode) -> list[float]:
    """Milliseconds that the environment took to carry out each of the agent's turns that are shown."""
    took = [step.milliseconds for step in row.steps]
    if not shown.left_out:
        return took
    half = len(shown.turns) // 2  # what is between the halves is not shown
    first, last = (sum(t.role == "assistant" for t in part) for part in (shown.turns[:half], shown.turns[half:]))
    return took[:first] + took[len(took) - last :]


def _spans(turns: Iterable[ShownTurn], took: Iterable[float]) -> Iterable[PlayedSpan]:
    """A span for each turn of the agent, with what was said before it, and one for each answer of a tool. The first
    answer has the milliseconds that all of its turn's took; how long a turn was sampled is not stored."""
    times, carried = iter(took), 0.0
    heard: list[dict[str, Any]] = []
    for turn in turns:
        told = {"role": turn.role, "content": turn.text, **({"calls": list(turn.calls)} if turn.calls else {})}
        if turn.role == "assistant":
            yield PlayedSpan("turn", "LLM", heard, told, 0.0)
            heard, carried = [], next(times, 0.0)
        elif turn.role == "tool":
            yield PlayedSpan("tool", "TOOL", heard[-1:], told, carried)
            heard, carried = [*heard, told], 0.0
        else:
            heard = [*heard, told]
