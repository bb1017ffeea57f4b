"""All figures of a round, collected from the store."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from db import ReleaseRow, RouteRow, StageRow
from environments.contract import Generators, Target
from models.policy import PolicyIdentity
from settings import Settings
from tasks.measuring.statistics import align, difference_of, mde_of, success_interval, task_differences
from tasks.reporting.analyst import analyst_figures, analyst_warnings, unpriced
from tasks.reporting.before_after import before_after, data_before, history_until, release_figures
from tasks.reporting.capabilities import capabilities_of
from tasks.reporting.figures import (
    CapabilityFigures,
    Difference,
    FamilyFigures,
    Provenance,
    Rate,
    RoundFigures,
    RouterFigures,
    SelectionRule,
)
from tasks.reporting.nothing_trained import Ended
from tasks.round.context import peak_gib
from tasks.round.results import (
    ContrastResult,
    GateResult,
    ReportResult,
    RouteResult,
    TestResult,
)
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound, in_order
from tasks.synthesis.learning.generalist import specialists

PACKAGES = ("prefect", "mlflow", "torch", "transformers", "peft", "trl", "SQLAlchemy", "pandas")


class _Cost(BaseModel):
    """What every stage's result says of its cost (see `StageResult`)."""

    earlier_seconds: float = 0.0
    model_seconds: float = 0.0
    environment_seconds: float = 0.0
    peak_gib: float = 0.0


def figures_of(
    stored: StoredRound, settings: Settings, target: Target, base: PolicyIdentity, ended: Ended
) -> RoundFigures:
    """Everything the report shows, from the store. `ended` says how practising ended."""
    store, current_round = stored.store, stored.round
    rows = in_order(store.rows(StageRow, round_id=current_round.id))
    stages = {r.name: r for r in rows if r.name != ReportResult.stage}  # its broken attempts, as itself, count nowhere
    costs = {name: _Cost.model_validate(r.result or {}) for name, r in stages.items()}
    test, contrast = stored.found(TestResult), stored.found(ContrastResult)
    sides = {name: outcomes(store, ids) for name, ids in test.sides().items()} if test else {}
    sides = {name: frame for name, frame in sides.items() if not frame.empty}  # the no-op's may all have been lost
    seconds = {name: round(r.seconds, 2) for name, r in stages.items() if r.seconds is not None}
    seconds = {"total": round(sum(seconds.values()), 2), **seconds}
    around, history = before_after(stored), history_until(stored, ended.reason)
    capabilities = capabilities_of(stored, around.renewed if around else frozenset())
    difference, gain = (_difference(sides, before) for before in ("base", "live"))
    uncompared = [
        f"{before} and routed finished no test task in common, so they were not compared: errors took the other "
        "episodes. Mend what they were lost to (docs/2-database.md, question 3), then begin another round."
        for before, found in (("base", difference), ("live", gain))
        if found is None and before in sides
    ]
    rule = settings.selection
    return RoundFigures(
        round=current_round.id,
        target=current_round.target,
        data_hash=current_round.data_hash,
        seed=current_round.seed,
        number=current_round.number,
        before=around.before if around else None,
        after=around.after if around else None,
        data_before=data_before(history),
        ending=ended.kind,
        **{name: _rate(frame) for name, frame in sides.items()},
        difference=difference,
        gain=gain,
        looks=test.looks if test else 0,
        families=_families(sides, bool(around and around.before)) if sides else {},
        capabilities=capabilities,
        release=release_figures(stored),
        history=history,
        router=_router(stored, target, test) if test else None,
        seconds=seconds,
        work=_work(costs, seconds),
        tokens=_tokens(stored),
        peak_gib=round(max([peak_gib(), *(c.peak_gib for c in costs.values())]), 2),
        errors=int(
            store.query(
                "SELECT COUNT(*) AS n FROM trajectories WHERE round_id = :r AND error_boundary IS NOT NULL",
                r=current_round.id,
            )["n"].iloc[0]
        ),
        selection=SelectionRule(
            rho=rule.rho,
            delta=rule.delta,
            k=rule.required,
            n=rule.runs,
            analyst=settings.analyst.kind,
            kappa=contrast.kappa if contrast else None,
        ),
        analyst=analyst_figures(settings, store, current_round.id, contrast),
        warnings=[
            *uncompared,
            *_warnings(capabilities),
            *analyst_warnings(capabilities, contrast, unpriced(settings, store, current_round.id)),
        ],
        stopped=ended.reason or None,
        provenance=Provenance(
            base_model=base.base,
            base_revision=base.revision,
            code_version=current_round.code_version,
            profile=settings.profile,
            packages={p: importlib.metadata.version(p) for p in PACKAGES},
        ),
    )


def _work(costs: Mapping[str, _Cost], seconds: Mapping[str, float]) -> dict[str, float]:
    """The stages' `seconds` by what took them. Workers that play at once spend more in all than their stage took: then
    its last attempt is split as their work is."""
    parts = {"model": 0.0, "environment": 0.0, "earlier": 0.0}
    for name, cost in costs.items():
        spent, took = cost.model_seconds + cost.environment_seconds, seconds.get(name, 0.0) - cost.earlier_seconds
        share = min(1.0, max(0.0, took) / spent) if spent else 1.0
        parts["model"] += share * cost.model_seconds
        parts["environment"] += share * cost.environment_seconds
        parts["earlier"] += cost.earlier_seconds
    parts["orchestration"] = seconds["total"] - sum(parts.values())
    return {name: round(value, 2) for name, value in parts.items()}


def _rate(frame: Any) -> Rate:
    interval = success_interval(frame)
    return Rate(success=interval.rate, low=interval.low, high=interval.high, n=interval.n, tasks=interval.tasks)


def _difference(sides: dict[str, Any], before: str) -> Difference | None:
    """The routed side against another; None where one was not played, or both finished no task in common."""
    if not {before, "routed"} <= sides.keys() or not set(sides[before]["task"]) & set(sides["routed"]["task"]):
        return None
    pairs = align(sides[before], sides["routed"])
    differences, left_out = task_differences(*(pairs[name].to_numpy() for name in ("base", "other", "task")))
    d = difference_of(differences, left_out)
    return Difference(points=d.points, p=d.p, mde=mde_of(differences), low=d.low, high=d.high, tasks=d.tasks)


def _families(sides: dict[str, Any], stood_on_a_release: bool) -> dict[str, FamilyFigures]:
    """By family; a side whose episodes of it were all lost is not known there, and not as another side."""
    figures = {}
    for family in sorted({f for name, frame in sides.items() if name != "noop" for f in frame["family"]}):
        rates = {name: _rate(f[f["family"] == family]) for name, f in sides.items() if (f["family"] == family).any()}
        base, routed, noop = rates.get("base"), rates.get("routed"), rates.get("noop")
        live = rates.get("live") if stood_on_a_release else None
        figures[family] = FamilyFigures(
            base=base.success if base else None,
            routed=routed.success if routed else None,
            n=max(rate.n for name, rate in rates.items() if name != "noop"),
            live=live.success if live else None,
            live_interval=(live.low, live.high) if live else None,
            base_interval=(base.low, base.high) if base else None,
            routed_interval=(routed.low, routed.high) if routed else None,
            noop=noop.success if noop else None,
            points=_points(sides, family, "base"),
            gained=_points(sides, family, "live") if live else None,
        )
    return figures


def _points(sides: dict[str, Any], family: str, before: str) -> float | None:
    """What a family gained on the tasks that both sides finished; None where there is none."""
    found = _difference({name: f[f["family"] == family] for name, f in sides.items() if name != "noop"}, before)
    return found.points if found else None


def _router(stored: StoredRound, target: Target, test: TestResult) -> RouterFigures | None:
    """How the candidate's router did on the examples that were kept out, and how the live one did on test: its
    decisions against the capability that a task's family is tagged with, of those that are served. Where one of these
    is no name of the target's, as a language model mines them, what a task needs is not known."""
    live = stored.store.row(ReleaseRow, target=stored.round.target, number=test.release) if test.release else None
    gated = stored.found(GateResult)
    served = list(live.members) if live else gated.promoted if gated else []
    # The base's episodes are those of earlier rounds, whose routers may have left them to it.
    routed = test.routed_ids if served and (live is None or live.router or live.router_path) else []
    routes = {r.trajectory_id: r for r in stored.store.rows(RouteRow, trajectory_id=routed)}
    fitted = stored.found(RouteResult)
    if not routes and (fitted is None or fitted.skipped):
        return None
    kept_out: dict[str, Any] = {}
    if fitted:
        candidate = stored.store.row(ReleaseRow, id=fitted.candidate) if fitted.candidate else None
        kept_out = {
            "right": fitted.right,
            "calibration": fitted.calibration,
            "mode": fitted.mode,
            "threshold": fitted.threshold,
            "unlike": str(candidate.evidence.get("unlike", "")) if candidate else "",
        }
    families = target.families() if isinstance(target, Generators) else {}
    known = {c for needed in families.values() for c in needed}
    if not routes:
        return RouterFigures(**kept_out)
    frame = outcomes(stored.store, test.routed_ids)
    # A task that did not open when it was to be routed has no decision, and may have opened when it was played.
    frame = frame[frame["id"].isin(list(routes))].drop_duplicates("task")
    times = sorted(r.milliseconds for r in routes.values())
    told = {
        "sent": sum(bool(routes[i].capability) for i in frame["id"]) / max(1, len(frame)),
        "milliseconds": times[len(times) // 2],
    }
    if not known.issuperset(specialists(served)):
        return RouterFigures(**kept_out, **told)
    pairs = Counter[tuple[str, str]]()
    for r in frame.itertuples():
        truth = next((c for c in served if c in families.get(r.family, ())), "")
        pairs[truth, routes[r.id].capability] += 1
    labels = [*served, ""]
    right = sum(n for (truth, chosen), n in pairs.items() if truth == chosen)
    return RouterFigures(
        **kept_out,
        **told,
        accuracy=right / max(1, sum(pairs.values())),
        labels=[label or "none" for label in labels],
        counts=[[pairs[a, b] for b in labels] for a in labels],
    )


def _tokens(stored: StoredRound) -> dict[str, int]:
    """Sampled tokens by purpose."""
    frame = stored.store.query(
        "SELECT purpose, SUM(sampled_tokens) AS sampled FROM trajectories WHERE round_id = :r GROUP BY purpose",
        r=stored.round.id,
    )
    tokens = {r.purpose: int(r.sampled) for r in frame.itertuples()}
    return {"total": sum(tokens.values()), **tokens}


def _warnings(capabilities: list[CapabilityFigures]) -> list[str]:
    return [
        f"{c.name}: {c.calibration.verdict}"
        for c in capabilities
        if c.calibration and c.calibration.accepted and "informative groups alone" in c.calibration.verdict
    ]
