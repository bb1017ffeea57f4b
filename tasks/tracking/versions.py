"""What a model version in MLflow says of itself: the gate's figures, and in words what it lacked, how it was trained,
what it won, what it costs and whom it beat."""

from __future__ import annotations

from db import AdapterRow, GatePlanRow
from models.adapters.registry import Registry
from models.adapters.releases import registered_version
from models.adapters.runs import RunLog, describe_capability, put_on_version
from tasks.measuring.decisions import CapabilityDecision
from tasks.measuring.gate_plan import p_phrase
from tasks.reporting.figures import CapabilityFigures, RoundFigures, duration, percent, release_name, two
from tasks.round.results import ChallengeResult, RegisterResult, TrainResult
from tasks.round.stored import StoredRound
from tasks.tracking.wrong_routes import BEGINS


def log_decision(registry: Registry, capability: str, version: str, decision: CapabilityDecision) -> None:
    """Write the gate's verdict on an adapter alone, with its figures over its own families (`gate/points` and others)
    where there are any, on its version and its run."""
    adapter, d = registered_version(registry, capability, version), decision.difference
    figures: dict[str, float] = {}
    if d is not None and decision.adjusted_p is not None and decision.mde is not None:
        figures = {"points": d.points, "p": d.p, "p_holm": decision.adjusted_p, "low": d.low, "high": d.high,
                   "mde": decision.mde, "tasks": float(d.tasks)}  # fmt: skip
    RunLog(registry, adapter.run_id).metrics({f"gate/{k}": v for k, v in figures.items()}, adapter)
    tags = {"gate": str(decision.verdict)} | {f"gate.{k}": f"{v:.4g}" for k, v in figures.items()}
    put_on_version(registry, adapter, tags)


def describe_versions(registry: Registry, stored: StoredRound, figures: RoundFigures) -> None:
    """Describe every version that the round registered. Done again it changes nothing."""
    for c in figures.capabilities:
        made = stored.found(RegisterResult, c.name)
        if made is None or made.skipped:
            continue
        adapter = registered_version(registry, c.name, made.version)
        log = RunLog(registry, adapter.run_id)
        log.params(_story(stored, c, figures))
        log.metrics(_cost(stored, c, figures), adapter)
        put_on_version(registry, adapter, {"verdict": c.verdict}, description(stored, c, figures))
        describe_capability(registry, adapter, c.definition or f"The capability {c.name} on {figures.target}.")


def description(stored: StoredRound, c: CapabilityFigures, figures: RoundFigures) -> str:
    """A version in Markdown, a line for each of the five questions."""
    told = {
        "Lacked": f"`{c.name}`: {_lacked(c, figures)}",
        "Trained": _trained(stored, c, figures),
        "Won": _won(c),
        "Costs": _costs(stored, c, figures),
        "Beat": _beat(stored, c, figures),
    }
    return "\n\n".join(f"**{name}** {text}" for name, text in told.items())


def _lacked(c: CapabilityFigures, figures: RoundFigures) -> str:
    if c.mean_cov is None:
        return c.definition
    meaning = f" {c.definition}" if c.definition else ""
    return (
        f"missing in {percent(c.mean_cov)} of the failures of night {figures.number or '?'}, contrast "
        f"{two(c.mean_delta)}, in {c.runs_passed} of {figures.selection.n} runs.{meaning}"
    )


def _trained(stored: StoredRound, c: CapabilityFigures, figures: RoundFigures) -> str:
    result = stored.result(TrainResult, c.name)
    row = stored.store.row(AdapterRow, id=result.adapter)
    config = row.config if row else {}
    told = result.in_words(c.learnt)
    if {"groups", "group_size"} <= set(config):
        told += f" of {config['groups']} groups x {config['group_size']} episodes"
    told += f" ({result.ending}), weights of step {result.chosen}"
    told += f", {'on ' if result.start else ''}from {result.began_from(c.name)}"
    told += f" from {c.learnt}" if result.before and not result.learnt else ""
    if {"rank", "alpha", "learning_rate"} <= set(config):
        told += f"; LoRA r = {config['rank']}, alpha = {config['alpha']}, learning rate {config['learning_rate']:g}"
    base = figures.provenance.base_model
    return f"{told}{f', on {base}' if base else ''}."


def _won(c: CapabilityFigures) -> str:
    told = f"{percent(c.base_success)} to {percent(c.adapter_success)} on fresh seeds of its environment"
    if c.points is not None and c.adjusted_p is not None:
        told += f"; {c.points:+.1f} points on its own families on validation ({p_phrase(c.adjusted_p)} after Holm)"
    return f"{told}."


def _costs(stored: StoredRound, c: CapabilityFigures, figures: RoundFigures) -> str:
    """Episodes and tokens of its training, the time of its stages, and what a wrong route would cost."""
    cost = _cost(stored, c, figures)
    told = (
        f"{cost['cost/episodes']:,.0f} training episodes, {cost['cost/tokens']:,.0f} sampled tokens, "
        f"{duration(cost['cost/seconds'])}."
    )
    wrong = [reason for reason in c.reasons if reason.startswith(BEGINS)]
    return " ".join([told, *wrong[:1]])


def _cost(stored: StoredRound, c: CapabilityFigures, figures: RoundFigures) -> dict[str, float]:
    """Episodes of the training, tokens sampled in it, and seconds of all stages of the capability."""
    frame = stored.store.query(
        "SELECT COUNT(*) AS episodes, COALESCE(SUM(sampled_tokens), 0) AS tokens FROM trajectories "
        "WHERE round_id = :r AND adapter_id = :a AND purpose = 'training'",
        r=stored.round.id,
        a=stored.result(TrainResult, c.name).adapter,
    )
    seconds = sum(figures.seconds.get(f"{s}:{c.name}", 0.0) for s in ("synthesize", "calibrate", "train", "register"))
    return {
        "cost/episodes": float(frame["episodes"].iloc[0]),
        "cost/tokens": float(frame["tokens"].iloc[0]),
        "cost/seconds": seconds,
    }


def _story(stored: StoredRound, c: CapabilityFigures, figures: RoundFigures) -> dict[str, object]:
    """What two versions side by side differ in, beside their figures, as parameters of their runs."""
    plan, made = stored.store.row(GatePlanRow, round_id=stored.round.id), figures.release
    return {
        "night": figures.number,
        "trained from": stored.result(TrainResult, c.name).began_from(c.name),
        "against": release_name(int(plan.rules.get("against", 0))) if plan else "nobody",
        "verdict alone": c.alone or "none",
        "verdict": c.verdict,
        "release": made.number if made is not None and c.name in {*made.new, *made.renewed} else "none",
    }


def _beat(stored: StoredRound, c: CapabilityFigures, figures: RoundFigures) -> str:
    """Whom it was judged against, with what result, and what became of the release that was to bring it."""
    plan, challenged = stored.store.row(GatePlanRow, round_id=stored.round.id), stored.found(ChallengeResult)
    if not c.alone or plan is None or challenged is None:
        return f"nobody yet: {c.verdict}."
    against = release_name(int(plan.rules.get("against", 0)))
    told = f"{against}, alone: {c.alone}." if c.alone == "better" else f"not {against}: {c.alone}."
    made = figures.release
    if made is not None and c.name in {*made.new, *made.renewed}:
        told += f" Release {made.number}, which has it: {made.verdict or 'not judged'}"
        told += f", {made.points:+.1f} points as a whole." if made.points is not None else "."
    return told
