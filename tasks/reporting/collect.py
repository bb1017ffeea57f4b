"""All figures of a round, collected from the store."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from typing import Any

from pydantic import BaseModel

from db import AdapterRow, CapabilityRow, RouteRow, SelectionRow, StageRow, TrainingStepRow, VerdictRow
from environments.contract import Generators, Target
from models.policy import PolicyIdentity
from settings import Settings
from tasks.measuring.statistics import align, clustered_interval, minimum_detectable_effect, paired_difference
from tasks.reporting.analyst import analyst_figures, analyst_warnings, versions_of
from tasks.reporting.figures import (
    Calibration,
    CapabilityFigures,
    Difference,
    FamilyFigures,
    Provenance,
    Rate,
    RoundFigures,
    RouterFigures,
    SelectionRule,
    TrainingStep,
)
from tasks.round.context import peak_gib
from tasks.round.results import (
    CalibrateResult,
    ContrastResult,
    GateResult,
    RegisterResult,
    SelectResult,
    StoredRound,
    SynthesizeResult,
    TestResult,
    TrainResult,
)
from tasks.round.rollouts import outcomes

PACKAGES = ("prefect", "mlflow", "torch", "transformers", "peft", "trl", "SQLAlchemy", "pandas")


class _Cost(BaseModel):
    """What every stage's result says of its cost (see `StageResult`)."""

    earlier_seconds: float = 0.0
    model_seconds: float = 0.0
    environment_seconds: float = 0.0
    peak_gib: float = 0.0


def figures_of(
    stored: StoredRound, settings: Settings, target: Target, base: PolicyIdentity, stopped: str = ""
) -> RoundFigures:
    """Everything the report shows, from the store. `stopped` says why the round trained nothing, where it did not."""
    store, current_round = stored.store, stored.round
    stages = {r.name: r for r in store.rows(StageRow, round_id=current_round.id)}
    costs = [_Cost.model_validate(r.result or {}) for r in stages.values()]
    test, contrast = stored.found(TestResult), stored.found(ContrastResult)
    sides = {name: outcomes(store, ids) for name, ids in test.sides().items()} if test else {}
    seconds = {name: round(r.seconds, 2) for name, r in stages.items() if r.seconds is not None}
    seconds = {"total": round(sum(seconds.values()), 2), **seconds}
    work = {
        "model": round(sum(c.model_seconds for c in costs), 2),
        "environment": round(sum(c.environment_seconds for c in costs), 2),
        "earlier": round(sum(c.earlier_seconds for c in costs), 2),
    }
    capabilities = _capabilities(stored)
    promoted = [c.name for c in capabilities if c.verdict == "promoted"]
    rule = settings.selection
    return RoundFigures(
        round=current_round.id,
        target=current_round.target,
        data_hash=current_round.data_hash,
        seed=current_round.seed,
        **{name: _rate(frame) for name, frame in sides.items()},
        difference=_difference(sides) if sides else None,
        families=_families(sides) if sides else {},
        capabilities=capabilities,
        router=_router(stored, target, test, promoted) if test else None,
        seconds=seconds,
        work={**work, "orchestration": round(seconds["total"] - sum(work.values()), 2)},
        tokens=_tokens(stored),
        peak_gib=round(max([peak_gib(), *(c.peak_gib for c in costs)]), 2),
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
        warnings=[*_warnings(capabilities), *analyst_warnings(capabilities, contrast)],
        stopped=stopped or None,
        provenance=Provenance(
            base_model=base.base,
            base_revision=base.revision,
            code_version=current_round.code_version,
            profile=settings.profile,
            packages={p: importlib.metadata.version(p) for p in PACKAGES},
        ),
    )


def _rate(frame: Any) -> Rate:
    interval = clustered_interval(frame["success"].astype(float).to_numpy(), frame["task"].to_numpy())
    return Rate(success=interval.rate, low=interval.low, high=interval.high, n=interval.n, tasks=interval.tasks)


def _difference(sides: dict[str, Any]) -> Difference:
    pairs = align(sides["base"], sides["routed"])
    base, other, tasks = pairs["base"].to_numpy(), pairs["other"].to_numpy(), pairs["task"].to_numpy()
    d = paired_difference(base, other, tasks)
    return Difference(
        points=d.points, p=d.p, mde=minimum_detectable_effect(base, other, tasks), low=d.low, high=d.high, tasks=d.tasks
    )


def _families(sides: dict[str, Any]) -> dict[str, FamilyFigures]:
    figures = {}
    for family in sorted(sides["base"]["family"].unique()):
        rates = {name: _rate(f[f["family"] == family]) for name, f in sides.items() if (f["family"] == family).any()}
        base, routed, noop = rates["base"], rates.get("routed", rates["base"]), rates.get("noop")
        figures[family] = FamilyFigures(
            base=base.success,
            routed=routed.success,
            n=base.n,
            base_interval=(base.low, base.high),
            routed_interval=(routed.low, routed.high),
            noop=noop.success if noop else None,
        )
    return figures


def _capabilities(stored: StoredRound) -> list[CapabilityFigures]:
    store, round_id = stored.store, stored.round.id
    rows = {r.id: r for r in store.rows(CapabilityRow, round_id=round_id)}
    verdicts = {r.subject: r for r in store.rows(VerdictRow, round_id=round_id)}
    adapters = {r.capability_id: r for r in store.rows(AdapterRow, round_id=round_id)}
    figures = []
    for s in sorted(
        store.rows(SelectionRow, round_id=round_id), key=lambda r: (r.rank is None, r.rank, -(r.mean_delta or 0.0))
    ):
        name, adapter = rows[s.capability_id].name, adapters.get(s.capability_id)
        registered = stored.found(RegisterResult, name)
        verdict, reasons = _last_word(stored, name, s, verdicts.get(name))
        steps = store.rows(TrainingStepRow, adapter_id=adapter.id) if adapter else []
        figures.append(
            CapabilityFigures(
                name=name,
                mean_cov=s.mean_cov,
                mean_delta=s.mean_delta,
                runs_passed=s.runs_passed,
                base_success=adapter.base_success if adapter else None,
                adapter_success=adapter.adapter_success if adapter else None,
                adapter=registered.served_name if registered else None,
                verdict=verdict,
                selected=s.selected,
                definition=rows[s.capability_id].definition,
                reasons=reasons,
                steps=[
                    TrainingStep(
                        step=r.step,
                        reward=r.reward,
                        success=r.success,
                        retention=r.metrics.get("retention_success"),
                    )
                    for r in sorted(steps, key=lambda r: r.step)
                    if r.reward is not None and r.success is not None  # every own episode was lost
                ],
                calibration=_calibration(stored, name),
                points=verdicts[name].points if name in verdicts else None,
                adjusted_p=verdicts[name].p_holm if name in verdicts else None,
                version=registered.version if registered else None,
                kappa=s.kappa,
                versions=versions_of(store, round_id, s.capability_id),
            )
        )
    return figures


def _last_word(
    stored: StoredRound, name: str, selection: SelectionRow, gated: VerdictRow | None
) -> tuple[str, list[str]]:
    """The verdict that stands last on a capability, with its reasons."""
    if gated is not None:
        return gated.verdict, list(gated.reasons)
    if not selection.selected:
        return "not-selected", [selection.reason]
    selected = stored.found(SelectResult)
    if selected and name in selected.unfit:
        return "not-trainable", [selected.unfit[name]]
    made, measured = stored.found(SynthesizeResult, name), stored.found(CalibrateResult, name)
    if made is None and stored.found(GateResult) is not None:
        return "over-budget", [
            "Selected, but the round trains fewer capabilities (selection.most); another round may take it."
        ]
    if made and not made.accepted:
        return "unsynthesizable", made.reasons
    if measured and not measured.accepted:
        return "mastered" if measured.mastered else "unsynthesizable", [measured.reason]
    trained = stored.found(TrainResult, name)
    if trained and trained.verdict:
        return "reward-misspecified", [trained.verdict]
    if trained and trained.unused:
        return "no-gain" if trained.steps else "mastered", [trained.unused]
    return "unfinished", ["The round stopped before the gate."]


def _calibration(stored: StoredRound, name: str) -> Calibration | None:
    measured, made = stored.found(CalibrateResult, name), stored.found(SynthesizeResult, name)
    if measured is None:
        return None
    return Calibration(
        accepted=measured.accepted,
        verdict=measured.reason,
        mean_reward=measured.mean_reward,
        success=measured.success_rate,
        informative=measured.informative,
        version=made.versions if made else 1,  # the accepted one is the last that a model wrote
    )


def _router(stored: StoredRound, target: Target, test: TestResult, served: list[str]) -> RouterFigures | None:
    """Decisions against the capability that a task's family is known to need (of those that are served)."""
    routes = {r.trajectory_id: r for r in stored.store.rows(RouteRow, trajectory_id=test.routed_ids)}
    if not routes or not isinstance(target, Generators):
        return None
    families = target.families()
    frame = outcomes(stored.store, test.routed_ids).drop_duplicates("task")
    pairs = Counter[tuple[str, str]]()
    for r in frame.itertuples():
        truth = next((c for c in served if c in families.get(r.family, ())), "")
        pairs[truth, routes[r.id].capability] += 1
    labels = [*served, ""]
    right = sum(n for (truth, chosen), n in pairs.items() if truth == chosen)
    times = sorted(r.milliseconds for r in routes.values())
    return RouterFigures(
        accuracy=right / max(1, sum(pairs.values())),
        labels=[label or "none" for label in labels],
        counts=[[pairs[a, b] for b in labels] for a in labels],
        milliseconds=times[len(times) // 2],
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
