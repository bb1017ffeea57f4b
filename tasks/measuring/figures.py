"""The figures of an evaluation, from its stored trajectories: success with intervals, by family, losses and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from db import Store
from tasks.measuring.evaluation import EvaluationRun, EvaluationSpec
from tasks.measuring.outcomes import evaluation_stage, played_releases
from tasks.measuring.statistics import success_interval

# Families shown in the table; the JSON has all of them.
FAMILIES_SHOWN = 12
# Characters of the first column; longer names are cut.
WIDEST = 48
# Values in one query.
PART = 20_000


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True)


class Success(_Figures):
    """A success rate in [0, 1] with its 95 % interval, clustered by task; over `tasks` tasks that were finished."""

    success: float
    low: float
    high: float
    tasks: int
    episodes: int
    reward: float


class EvaluationRow(_Figures):
    """One policy on one target's split. `scored` is None while no episode was finished; `lost` counts episodes by the
    part of the system that lost them, `owed` those without a result,
    `earlier` those whose result an earlier run stored. `release` is the number of the release that was played (0: the
    bare base), None where it was none."""

    target: str
    split: str
    policy: str
    evaluation: str
    release: int | None = None
    data_hash: str
    user: str
    seed: int
    trials: int
    tasks: int
    scored: Success | None
    families: dict[str, Success]
    metrics: dict[str, float]
    terminations: dict[str, int]
    lost: dict[str, int]
    owed: int
    earlier: int = 0
    steps: float
    sampled_tokens: int
    dollars: float
    stopped: str = ""
    first_error: str = ""
    answered_by: list[str] = []


def success_of(frame: pd.DataFrame) -> Success | None:
    """Figures of trajectories [task_id, success, reward], None when there is none."""
    if frame.empty:
        return None
    interval = success_interval(frame, "task_id")
    # Reward as success is: the mean over tasks of each task's mean.
    reward = float(frame.groupby("task_id")["reward"].mean().mean())
    return Success(
        success=interval.rate, low=interval.low, high=interval.high, tasks=interval.tasks, episodes=interval.n,
        reward=reward,
    )  # fmt: skip


def stored_frame(store: Store, ids: Sequence[str]) -> pd.DataFrame:
    """The trajectories with these ids, those that were lost included."""
    parts = [store.trajectory_frame(None, id=list(ids[i : i + PART])) for i in range(0, len(ids), PART)]
    return pd.concat(parts, ignore_index=True)


def figures_of(store: Store, spec: EvaluationSpec, policy: str, run: EvaluationRun) -> tuple[EvaluationRow, Any]:
    """The figures, and the frame of finished trajectories that they were made of."""
    frame = stored_frame(store, run.ids)
    lost = frame[frame["error_boundary"].notna()]
    finished = frame[frame["error_boundary"].isna()]
    families = {str(n): success_of(part) for n, part in sorted(finished.groupby("family"), key=lambda p: -len(p[1]))}
    row = EvaluationRow(
        target=spec.called,
        split=spec.split,
        policy=policy,
        evaluation=run.id,
        release=played_releases(store, [run.id]).get(run.id),
        data_hash=spec.target.data_hash,
        user=spec.user,
        seed=spec.seed,
        trials=spec.trials,
        tasks=len(spec.tasks),
        scored=success_of(finished),
        families={n: s for n, s in families.items() if s is not None},
        metrics=_means(finished["metrics"].tolist()),
        terminations={str(k): int(v) for k, v in finished["termination"].value_counts().items()},
        lost={str(k): int(v) for k, v in lost["error_boundary"].value_counts().items()},
        owed=len(run.ids) - len(finished),
        earlier=run.resumed,
        steps=float(finished["n_steps"].mean()) if len(finished) else 0.0,
        sampled_tokens=int(frame["sampled_tokens"].sum()),
        dollars=store.spent(None, stage=evaluation_stage(run.id))["dollars"],
        stopped=run.stopped,
        first_error=str(lost["error"].iloc[0]) if len(lost) else "",
        answered_by=run.answered_by,
    )
    return row, finished


def overall(name: str, rows: Sequence[tuple[EvaluationRow, pd.DataFrame]]) -> EvaluationRow:
    """Several targets of one benchmark as one row; a target is a family of it."""
    first = rows[0][0]
    frames = [f.assign(task_id=r.target + "/" + f["task_id"].astype(str)) for r, f in rows]
    return first.model_copy(
        update={
            "target": name,
            "evaluation": "",
            "release": first.release if len({r.release for r, _ in rows}) == 1 else None,
            "data_hash": " ".join(r.data_hash for r, _ in rows),
            "tasks": sum(r.tasks for r, _ in rows),
            "scored": success_of(pd.concat(frames, ignore_index=True)),
            "families": {r.target: r.scored for r, _ in rows if r.scored is not None},
            "metrics": {},
            "terminations": _added([r.terminations for r, _ in rows]),
            "lost": _added([r.lost for r, _ in rows]),
            "owed": sum(r.owed for r, _ in rows),
            "earlier": sum(r.earlier for r, _ in rows),
            "steps": sum(r.steps * len(f) for r, f in rows) / max(1, sum(len(f) for _, f in rows)),
            "sampled_tokens": sum(r.sampled_tokens for r, _ in rows),
            "dollars": sum(r.dollars for r, _ in rows),
            "stopped": next((r.stopped for r, _ in rows if r.stopped), ""),
            "first_error": next((r.first_error for r, _ in rows if r.first_error), ""),
            "answered_by": sorted({name for r, _ in rows for name in r.answered_by}),
        }
    )


def table(rows: Sequence[EvaluationRow]) -> list[str]:
    """The rows as lines of text: what was measured, the table, and what the reader has to know beside it."""
    lines = list[str]()
    for key in dict.fromkeys((r.target, r.split) for r in rows):
        mine = [r for r in rows if (r.target, r.split) == key]
        first = mine[0]
        lines.append(
            f"{first.target} {first.split}: {first.tasks} tasks, data {first.data_hash}, "
            f"user: {first.user}, seed {first.seed}"
        )
        wide = min(WIDEST, max(12, *(len(n) + 2 for r in mine for n in (r.policy, *_shown(r)))))
        lines.append(
            f"{'policy':<{wide}} {'success':>8}  {'95 % interval':<15} {'reward':>6} {'episodes':>8} {'lost':>5}"
        )
        for r in mine:
            lines.append(_line(r.policy, wide, r.scored, sum(r.lost.values())))
            lines += [_line("  " + f, wide, s, None) for f, s in _shown(r).items()]
            if 0 < len(_shown(r)) < len(r.families):
                lines.append(f"  ... and {len(r.families) - FAMILIES_SHOWN} families more (--json)")
        lines += [note for r in mine for note in _notes(r)]
        lines.append("")
    return lines[:-1]


def _shown(row: EvaluationRow) -> dict[str, Success]:
    """The families worth a line: none where there is only one, and none under no-op."""
    if len(row.families) < 2 or row.policy == "noop":
        return {}
    return dict(list(row.families.items())[:FAMILIES_SHOWN])


def _line(name: str, wide: int, s: Success | None, lost: int | None) -> str:
    name = name if len(name) <= wide else name[: wide - 3] + "..."
    lost_text = "" if lost is None else str(lost)
    if s is None:
        return f"{name:<{wide}} {'-':>8}  {'':<15} {'-':>6} {0:>8} {lost_text:>5}"
    rate, interval = f"{100 * s.success:>6.1f} %", f"[{100 * s.low:.1f}, {100 * s.high:.1f}]"
    return f"{name:<{wide}} {rate}  {interval:<15} {s.reward:>6.3f} {s.episodes:>8} {lost_text:>5}".rstrip()


def _notes(r: EvaluationRow) -> list[str]:
    notes = []
    if r.evaluation and r.policy != "noop":  # what 'compare' takes
        of = "" if r.release is None else f", of release@{r.release}"
        notes.append(f"{r.policy}: evaluation {r.evaluation}{of}")
    ended = {k: n for k, n in r.terminations.items() if k != "done"}
    if ended:
        notes.append(f"{r.policy}: ended without the environment: " + ", ".join(f"{k} {n}" for k, n in ended.items()))
    truncated = r.metrics.get("truncated", 0.0)
    if truncated:
        notes.append(f"{r.policy}: {truncated:.2f} turns an episode were cut at the token limit; raise --max-tokens")
    benchmark = {k: v for k, v in r.metrics.items() if k not in ("model_calls", "model_seconds", "truncated")}
    if benchmark:
        notes.append(f"{r.policy}: " + ", ".join(f"{k} {v:.3f}" for k, v in sorted(benchmark.items())))
    if r.answered_by:
        notes.append(f"{r.policy}: answered by {', '.join(r.answered_by)}, ${r.dollars:.4f}")
    if r.lost:
        parts = ", ".join(f"{k} {n}" for k, n in r.lost.items())
        notes.append(f"{r.policy}: lost to {parts}; the first: {r.first_error[:300]}")
    if r.earlier:
        of = f"{r.earlier} of {r.tasks * r.trials} episodes"
        notes.append(f"{r.policy}: {of} are from an earlier run; --fresh plays them again")
    if r.owed:
        notes.append(f"{r.policy}: INCOMPLETE, {r.owed} of {r.tasks * r.trials} episodes have no result")
    return notes


def _means(metrics: Sequence[Any]) -> dict[str, float]:
    """Mean of each metric over the episodes that have it."""
    names = sorted({name for m in metrics for name in (m or {})})
    return {n: float(np.mean([float(m[n]) for m in metrics if m and n in m])) for n in names}


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total = dict[str, int]()
    for part in counts:
        for name, n in part.items():
            total[name] = total.get(name, 0) + n
    return total
