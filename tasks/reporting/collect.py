"""All figures of a round, collected from the store."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from db import AdapterRow, CapabilityRow, ReleaseRow, RouteRow, SelectionRow, StageRow, TrainingStepRow, VerdictRow
from environments.contract import Generators, Target
from models.policy import PolicyIdentity
from settings import Settings
from tasks.measuring.statistics import align, clustered_interval, minimum_detectable_effect, paired_difference
from tasks.reporting.analyst import analyst_figures, analyst_warnings, versions_of
from tasks.reporting.before_after import before_after, data_before, history_until, last_verdict, release_figures
from tasks.reporting.figures import (
    Calibration,
    CapabilityFigures,
    Difference,
    Ending,
    FamilyFigures,
    Provenance,
    Rate,
    RoundFigures,
    RouterFigures,
    SelectionRule,
    TrainingStep,
    Transfer,
)
from tasks.reporting.history import WHOLE
from tasks.reporting.nothing_trained import Ended
from tasks.round.adapters import adapter_id
from tasks.round.context import peak_gib
from tasks.round.results import (
    CalibrateResult,
    ContrastResult,
    GateResult,
    RegisterResult,
    RouteResult,
    SelectResult,
    SynthesizeResult,
    TestResult,
    TrainResult,
)
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound, in_order
from tasks.synthesis.learning.generalist import specialists
from tasks.synthesis.starting import told_starts

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
    stages = {r.name: r for r in in_order(store.rows(StageRow, round_id=current_round.id))}
    costs = [_Cost.model_validate(r.result or {}) for r in stages.values()]
    test, contrast = stored.found(TestResult), stored.found(ContrastResult)
    sides = {name: outcomes(store, ids) for name, ids in test.sides().items()} if test else {}
    sides = {name: frame for name, frame in sides.items() if not frame.empty}  # the no-op's may all have been lost
    seconds = {name: round(r.seconds, 2) for name, r in stages.items() if r.seconds is not None}
    seconds = {"total": round(sum(seconds.values()), 2), **seconds}
    work = {
        "model": round(sum(c.model_seconds for c in costs), 2),
        "environment": round(sum(c.environment_seconds for c in costs), 2),
        "earlier": round(sum(c.earlier_seconds for c in costs), 2),
    }
    around, history = before_after(stored), history_until(stored, ended.reason)
    capabilities = _capabilities(stored, around.renewed if around else frozenset())
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
        difference=_difference(sides["base"], sides["routed"]) if sides else None,
        gain=_difference(sides["live"], sides["routed"]) if "live" in sides else None,
        looks=test.looks if test else 0,
        families=_families(sides, bool(around and around.before)) if sides else {},
        capabilities=capabilities,
        release=release_figures(stored),
        history=history,
        router=_router(stored, target, test) if test else None,
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
        stopped=ended.reason or None,
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


def _difference(before: Any, after: Any) -> Difference:
    pairs = align(before, after)
    base, other, tasks = pairs["base"].to_numpy(), pairs["other"].to_numpy(), pairs["task"].to_numpy()
    d = paired_difference(base, other, tasks)
    return Difference(
        points=d.points, p=d.p, mde=minimum_detectable_effect(base, other, tasks), low=d.low, high=d.high, tasks=d.tasks
    )


def _families(sides: dict[str, Any], stood_on_a_release: bool) -> dict[str, FamilyFigures]:
    figures = {}
    for family in sorted(sides["base"]["family"].unique()):
        rates = {name: _rate(f[f["family"] == family]) for name, f in sides.items() if (f["family"] == family).any()}
        base, routed, noop = rates["base"], rates.get("routed", rates["base"]), rates.get("noop")
        live = rates.get("live") if stood_on_a_release else None
        figures[family] = FamilyFigures(
            base=base.success,
            routed=routed.success,
            n=base.n,
            live=live.success if live else None,
            live_interval=(live.low, live.high) if live else None,
            base_interval=(base.low, base.high),
            routed_interval=(routed.low, routed.high),
            noop=noop.success if noop else None,
        )
    return figures


def _capabilities(stored: StoredRound, before: Collection[str]) -> list[CapabilityFigures]:
    store, round_id = stored.store, stored.round.id
    rows = {r.id: r for r in store.rows(CapabilityRow, round_id=round_id)}
    verdicts = {r.subject: r for r in store.rows(VerdictRow, round_id=round_id)}
    adapters = {r.id: r for r in store.rows(AdapterRow, round_id=round_id)}
    figures = []
    for s in sorted(
        store.rows(SelectionRow, round_id=round_id), key=lambda r: (r.rank is None, r.rank, -(r.mean_delta or 0.0))
    ):
        name = rows[s.capability_id].name
        registered = stored.found(RegisterResult, name)
        gated = verdicts.get(name)
        verdict, reasons = last_verdict(gated, verdicts.get(WHOLE)) if gated else _last_word(stored, name, s)
        trained, made = stored.found(TrainResult, name), stored.found(SynthesizeResult, name)
        # Of several versions of an environment each has an adapter of its own.
        version = made.versions if made else 1
        adapter = adapters.get(trained.adapter if trained else adapter_id(round_id, name, version))
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
                alone=gated.verdict if gated else "",
                renewed=name in before,
                ending=trained.ending if trained else "",
                chosen=trained.chosen if trained else None,
                selected=s.selected,
                definition=rows[s.capability_id].definition,
                reasons=reasons,
                steps=[_step(r) for r in sorted(steps, key=lambda r: r.step)],
                calibration=_calibration(stored, name),
                points=gated.points if gated else None,
                adjusted_p=gated.p_holm if gated else None,
                version=registered.version if registered else None,
                kappa=s.kappa,
                versions=versions_of(store, round_id, s.capability_id),
                transfer=_transfer(trained),
                begun=told_starts(trained.starts, trained.keeps) if trained and trained.starts else "",
                passed_over=made.passed_over if made else {},
            )
        )
    return figures


def _step(row: TrainingStepRow) -> TrainingStep:
    """A step's figures, on the capability's own scenarios where they were counted apart."""
    own = {name: row.metrics.get(f"own_{name}", getattr(row, name)) for name in ("reward", "success")}
    return TrainingStep(step=row.step, retention=row.metrics.get("retention_success"), **own)


def _last_word(stored: StoredRound, name: str, selection: SelectionRow) -> tuple[str, list[str]]:
    """What stands last on a capability that the gate did not judge, with its reasons."""
    if not selection.selected:
        return "not-selected", [selection.reason]
    selected = stored.found(SelectResult)
    if selected and name in selected.unfit:
        return "not-trainable", [selected.unfit[name]]
    made, measured = stored.found(SynthesizeResult, name), stored.found(CalibrateResult, name)
    if made is None and stored.found(GateResult) is not None:
        return "postponed", [
            "Selected, but the round trains fewer capabilities (selection.most); another round may take it."
        ]
    if made and not made.accepted:
        return "unsynthesizable", made.reasons
    if measured and not measured.accepted:
        return "mastered" if measured.mastered else "unsynthesizable", [measured.reason]
    trained = stored.found(TrainResult, name)
    if trained and trained.verdict:
        return trained.verdict.partition(":")[0], [trained.verdict]
    if trained and trained.unused:
        return "mastered" if trained.ending == Ending.MASTERED else "no-gain", [trained.unused]
    return "unfinished", ["The round stopped before the gate."]


def _transfer(trained: TrainResult | None) -> Transfer | None:
    if trained is None or trained.transfer is None:
        return None
    return Transfer(**trained.transfer.model_dump(include=set(Transfer.model_fields)))


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


def _router(stored: StoredRound, target: Target, test: TestResult) -> RouterFigures | None:
    """How the candidate's router did on the examples that were kept out, and how the live one did on test: its
    decisions against the capability that a task's family is tagged with, of those that are served. Where one of these
    is no name of the target's, as a language model mines them, what a task needs is not known."""
    routes = {r.trajectory_id: r for r in stored.store.rows(RouteRow, trajectory_id=test.routed_ids)}
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
    live = stored.store.row(ReleaseRow, target=stored.round.target, number=test.release) if test.release else None
    families = target.families() if isinstance(target, Generators) else {}
    known = {c for needed in families.values() for c in needed}
    served = list(live.members) if live else stored.result(GateResult).promoted
    if not (routes and served):
        return RouterFigures(**kept_out)
    frame = outcomes(stored.store, test.routed_ids).drop_duplicates("task")
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
