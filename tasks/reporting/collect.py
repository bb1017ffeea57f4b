"""All figures of a round, collected from the store."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from typing import Any

from environments.contract import Generators
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
from tasks.round.context import Context, peak_gib
from tasks.round.rollouts import outcomes

PACKAGES = ("prefect", "mlflow", "torch", "transformers", "peft", "trl", "SQLAlchemy", "pandas")


def figures_of(context: Context, stopped: str = "") -> RoundFigures:
    """Everything the report shows, from the store."""
    store, current_round, settings = context.store, context.round, context.settings
    stages = {r["name"]: r for r in store.rows("stages", round_id=current_round.id)}
    results = {name: r["result"] or {} for name, r in stages.items()}
    test = results.get("evaluate:test", {})
    sides = {name: outcomes(context, test[f"{name}_ids"]) for name in ("base", "routed", "noop")} if test else {}
    seconds = {name: round(r["seconds"], 2) for name, r in stages.items() if r["seconds"] is not None}
    seconds = {"total": round(sum(seconds.values()), 2), **seconds}
    work = {
        k: round(sum(r.get(f"{k}_seconds", 0.0) for r in results.values()), 2)
        for k in ("model", "environment", "earlier")
    }
    capabilities = _capabilities(context, results)
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
        router=_router(context, test, [c.name for c in capabilities if c.verdict == "promoted"]) if test else None,
        seconds=seconds,
        work={**work, "orchestration": round(seconds["total"] - sum(work.values()), 2)},
        tokens=_tokens(context),
        peak_gib=round(max([peak_gib(), *(r.get("peak_gib", 0.0) for r in results.values())]), 2),
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
            kappa=results.get("contrast", {}).get("kappa"),
        ),
        analyst=analyst_figures(context, results),
        warnings=[*_warnings(capabilities), *analyst_warnings(capabilities, results)],
        stopped=stopped or None,
        provenance=Provenance(
            base_model=context.base.identity.base,
            base_revision=context.base.identity.revision,
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


def _capabilities(context: Context, results: dict[str, Any]) -> list[CapabilityFigures]:
    store, round_id = context.store, context.round.id
    rows = {r["id"]: r for r in store.rows("capabilities", round_id=round_id)}
    verdicts = {r["subject"]: r for r in store.rows("verdicts", round_id=round_id)}
    adapters = {r["capability_id"]: r for r in store.rows("adapters", round_id=round_id)}
    finished = "gate" in results or "evaluate:test" in results
    figures = []
    for s in sorted(
        store.rows("selections", round_id=round_id), key=lambda r: (r["rank"] is None, r["rank"], -r["mean_delta"])
    ):
        name, adapter = rows[s["capability_id"]]["name"], adapters.get(s["capability_id"])
        verdict, reasons = _last_word(name, s, results, verdicts, finished and f"synthesize:{name}" not in results)
        steps = store.rows("training_steps", adapter_id=adapter["id"]) if adapter else []
        registered = results.get(f"register:{name}", {})
        figures.append(
            CapabilityFigures(
                name=name,
                mean_cov=s["mean_cov"],
                mean_delta=s["mean_delta"],
                runs_passed=s["runs_passed"],
                base_success=adapter["base_success"] if adapter else None,
                adapter_success=adapter["adapter_success"] if adapter else None,
                adapter=registered.get("served_name"),
                verdict=verdict,
                selected=s["selected"],
                definition=rows[s["capability_id"]]["definition"],
                reasons=reasons,
                steps=[
                    TrainingStep(step=r["step"], reward=r["reward"], success=r["success"])
                    for r in sorted(steps, key=lambda r: r["step"])
                ],
                calibration=_calibration(results.get(f"calibrate:{name}"), results.get(f"synthesize:{name}")),
                points=verdicts[name]["points"] if name in verdicts else None,
                adjusted_p=verdicts[name]["p_holm"] if name in verdicts else None,
                version=registered.get("version"),
                kappa=s["kappa"],
                versions=versions_of(context, s["capability_id"]),
            )
        )
    return figures


def _last_word(
    name: str, selection: dict[str, Any], results: dict[str, Any], verdicts: dict[str, Any], over: bool
) -> tuple[str, list[str]]:
    """The final verdict on a capability, with its reasons."""
    if name in verdicts:
        return verdicts[name]["verdict"], list(verdicts[name]["reasons"])
    if not selection["selected"]:
        return "not-selected", [selection["reason"]]
    if name in results.get("select", {}).get("unfit", {}):
        return "not-trainable", [results["select"]["unfit"][name]]
    if over:
        return "over-budget", [
            "Selected, but the round trains fewer capabilities (selection.most); another round may take it."
        ]
    for stage in ("synthesize", "calibrate"):
        result = results.get(f"{stage}:{name}")
        if result and not result.get("accepted"):
            return "unsynthesizable", result.get("reasons") or [result.get("reason", "")]
    training = results.get(f"train:{name}", {})
    if training.get("verdict"):
        return "reward-misspecified", [training["verdict"]]
    return "unfinished", ["The round stopped before the gate."]


def _calibration(result: dict[str, Any] | None, synthesis: dict[str, Any] | None) -> Calibration | None:
    if not result:
        return None
    return Calibration(
        accepted=result["accepted"],
        verdict=result["reason"],
        mean_reward=result["mean_reward"],
        success=result["success_rate"],
        informative=result["informative"],
        version=(synthesis or {}).get("versions", 1),  # the accepted one is the last that a model wrote
    )


def _router(context: Context, test: dict[str, Any], served: list[str]) -> RouterFigures | None:
    """Decisions against the capability that a task's family is known to need (of those that are served)."""
    routes = {r["trajectory_id"]: r for r in context.store.rows("routes", trajectory_id=list(test["routed_ids"]))}
    if not routes or not isinstance(context.target, Generators):
        return None
    families = context.target.families()
    frame = outcomes(context, test["routed_ids"]).drop_duplicates("task")
    pairs = Counter[tuple[str, str]]()
    for r in frame.itertuples():
        truth = next((c for c in served if c in families.get(r.family, ())), "")
        pairs[truth, routes[r.id]["capability"]] += 1
    labels = [*served, ""]
    right = sum(n for (truth, chosen), n in pairs.items() if truth == chosen)
    times = sorted(r["milliseconds"] for r in routes.values())
    return RouterFigures(
        accuracy=right / max(1, sum(pairs.values())),
        labels=[label or "none" for label in labels],
        counts=[[pairs[a, b] for b in labels] for a in labels],
        milliseconds=times[len(times) // 2],
    )


def _tokens(context: Context) -> dict[str, int]:
    """Sampled tokens by purpose."""
    frame = context.store.query(
        "SELECT purpose, SUM(sampled_tokens) AS sampled FROM trajectories WHERE round_id = :r GROUP BY purpose",
        r=context.round.id,
    )
    tokens = {r.purpose: int(r.sampled) for r in frame.itertuples()}
    return {"total": sum(tokens.values()), **tokens}


def _warnings(capabilities: list[CapabilityFigures]) -> list[str]:
    return [
        f"{c.name}: {c.calibration.verdict}"
        for c in capabilities
        if c.calibration and c.calibration.accepted and "informative groups alone" in c.calibration.verdict
    ]
