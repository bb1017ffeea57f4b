"""Stage 4: compose one training environment per capability, validate it without a model, calibrate it with the base."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from prefect import task
from prefect.artifacts import create_markdown_artifact

from db import row_id
from environments.composed import ComposedEnvironment, CompositionSpec
from environments.contract import Generators
from environments.validation import Limits, validate_environment, wilson_interval
from models.episodes import Episode
from tasks.context import Context, current
from tasks.mine import RETRIES, diagnosis_ids
from tasks.playing import Playground, outcomes, play_owed

# Calibration seeds count down from here: training counts up from 0, fresh evaluation from FRESH.
CALIBRATION_SEED = -1
FRESH_SEED = 5_000_000
# Success of the base from which a family counts as mastered: nothing to train there, much to forget.
MASTERED = 0.5


def compose(context: Context, capability: str, version: int = 1) -> ComposedEnvironment:
    """The environment of a capability.

    Its families need the capability, are not mastered, and otherwise need only what the base has shown; retention
    families are all others in which the base has any success. A family is never in both.
    """
    generators = context.target
    assert isinstance(generators, Generators)
    frame = outcomes(context, diagnosis_ids(context.round.id))
    success = frame.groupby("family")["success"].mean().to_dict()
    families = generators.families()
    shown = {c for name, needs in families.items() if success.get(name, 0.0) >= MASTERED for c in needs}
    needing = sorted(n for n, needs in families.items() if capability in needs and success.get(n, 0.0) < MASTERED)
    alone = [n for n in needing if set(families[n]) - {capability} <= shown]
    own = tuple(alone or needing or sorted(n for n, needs in families.items() if capability in needs))
    retention = tuple(sorted(n for n in families if n not in own and success.get(n, 0.0) > 0))
    share = context.settings.calibration.retention_share if retention else 0.0
    spec = CompositionSpec(context.round.target, context.round.data_hash, capability, own, retention, share, version)
    return ComposedEnvironment(context.target, spec)


def stored_environment(context: Context, capability: str) -> ComposedEnvironment:
    """The environment as it was stored by `synthesize`."""
    row = context.store.rows(
        "synthesized_environments", round_id=context.round.id, capability_id=row_id(context.round.id, capability)
    )[-1]
    spec: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["spec"].items()}
    return ComposedEnvironment(context.target, CompositionSpec(**spec))


@task(name="synthesize", task_run_name="synthesize {capability}", **RETRIES)
def synthesize(round_id: str, capability: str) -> dict[str, Any]:
    """Compose, store and validate; returns the environment's id, whether it passed, and why not."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        if not isinstance(context.target, Generators):
            reason = (
                f"target {context.round.target!r} has no generators to compose scenarios from; "
                "the llm synthesizer writes environments for such targets"
            )
            return {"accepted": False, "reasons": [reason], "environment": None}
        if not any(capability in needs for needs in context.target.families().values()):
            reason = (
                f"no family of {context.round.target!r} is tagged with {capability!r}, "
                "so nothing can be composed for it"
            )
            return {"accepted": False, "reasons": [reason], "environment": None}
        environment = compose(context, capability)
        spec = environment.spec
        identity = row_id(round_id, spec.id)
        settings = context.settings.calibration
        limits = Limits(
            distinct=settings.distinct,
            searched=2 * settings.distinct,
            episodes=settings.policy_episodes,
            attack_seeds=2,
            replayed=10,
        )
        with context.environment:
            verdict = validate_environment(environment.environment, environment.scenario, limits)
        context.store.put(
            "synthesized_environments",
            [
                {
                    "id": identity,
                    "round_id": round_id,
                    "capability_id": row_id(round_id, capability),
                    "version": spec.version,
                    "kind": "generators",
                    "spec": asdict(spec),
                    "code_hash": spec.id,
                    "state": "draft",
                    "sandbox_level": "none",
                    "verdicts": verdict.as_dict(),
                }
            ],
        )
        if context.store.row("synthesized_environments", id=identity)["state"] == "draft":  # type: ignore[index]
            context.store.set_state("synthesized_environments", identity, "checked" if verdict.accepted else "rejected")
        return {"accepted": verdict.accepted, "reasons": list(verdict.reasons), "environment": identity}

    return context.stage(f"synthesize:{capability}", work)


@task(name="calibrate", task_run_name="calibrate {capability}", **RETRIES)
def calibrate(round_id: str, capability: str, environment_id: str) -> dict[str, Any]:
    """Play the base `samples` times on each of `seeds` scenarios of the capability; decide whether it may train."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        s = context.settings.calibration
        environment = stored_environment(context, capability)
        tasks = [environment.own_scenario(CALIBRATION_SEED - i) for i in range(s.seeds)]
        ground = Playground(
            environment.environment,
            environment.spec.id,
            "calibration",
            context.settings.train.temperature,
            context.settings.rollout.max_tokens,
        )
        episodes = [Episode("", t, context.settings.seed, k) for t in tasks for k in range(s.samples)]
        ids = play_owed(context, ground, episodes, what=f"calibrate {capability}")
        frame = outcomes(context, ids)
        rewards = [frame[frame["task"] == t.id]["reward"].to_numpy() for t in tasks]
        wins = [frame[frame["task"] == t.id]["success"].to_numpy() for t in tasks]
        figures = calibration_figures([r for r in rewards if len(r)], [w for w in wins if len(w)])
        accepted, reason = judge(figures, s.model_dump())
        row = {
            "id": row_id(environment_id, "calibration"),
            "environment_id": environment_id,
            "policy_id": context.base.identity.id,
            "seeds": len(tasks),
            "samples": s.samples,
            **{
                k: figures[k]
                for k in (
                    "mean_reward",
                    "success_rate",
                    "std_reward",
                    "all_success",
                    "all_zero",
                    "informative",
                    "low",
                    "high",
                )
            },
            "accepted": accepted,
            "reason": reason,
            "detail": {"families": frame.groupby("family")["success"].mean().to_dict()},
        }
        context.store.put("calibrations", [row])
        if context.store.row("synthesized_environments", id=environment_id)["state"] == "checked":  # type: ignore[index]
            context.store.set_state("synthesized_environments", environment_id, "accepted" if accepted else "rejected")
        create_markdown_artifact(
            key=f"calibration-{capability.replace('_', '-')}",
            description=f"How the base model does in the environment made for {capability}",
            markdown=f"**{capability}**: {reason}\n\n" + "\n".join(f"- {k}: {v:.3f}" for k, v in figures.items()),
        )
        return {"accepted": accepted, "reason": reason, **figures}

    return context.stage(f"calibrate:{capability}", work)


def calibration_figures(rewards: list[Any], wins: list[Any]) -> dict[str, float]:
    """Figures over groups (one array per seed).

    Means, spread, shares of uniform and of informative groups, and the interval of success.
    """
    flat, won = np.concatenate(rewards), np.concatenate(wins)
    low, high = wilson_interval(int(won.sum()), len(won))
    return {
        "mean_reward": float(flat.mean()),
        "success_rate": float(won.mean()),
        "std_reward": float(flat.std()),
        "all_success": float(np.mean([w.all() for w in wins])),
        "all_zero": float(np.mean([not r.any() for r in rewards])),
        "informative": float(np.mean([np.ptp(r) > 1e-6 for r in rewards])),
        "low": float(low),
        "high": float(high),
    }


def judge(figures: dict[str, float], rule: dict[str, Any]) -> tuple[bool, str]:
    """Whether the figures allow training, and the reason in words."""
    wrong = []
    for name, label in (("mean_reward", "mean reward"), ("success_rate", "success")):
        if not rule["low"] <= figures[name] <= rule["high"]:
            wrong.append(f"{label} {figures[name]:.2f} outside [{rule['low']}, {rule['high']}]")
    if figures["std_reward"] < rule["spread"]:
        wrong.append(f"spread of rewards {figures['std_reward']:.3f} below {rule['spread']}")
    for name, label in (("all_success", "all-success"), ("all_zero", "all-zero")):
        if figures[name] > rule["uniform"]:
            wrong.append(f"{100 * figures[name]:.0f} % of groups are {label}, at most {100 * rule['uniform']:.0f} %")
    if figures["informative"] < rule["informative"]:
        wrong.append(
            f"only {100 * figures['informative']:.0f} % of groups are informative, "
            f"{100 * rule['informative']:.0f} % needed"
        )
    if not wrong:
        return True, "within the band"
    enough = (
        figures["informative"] >= rule["informative"]
        and figures["std_reward"] >= rule["spread"]
        and figures["success_rate"] <= rule["high"]
    )
    if rule["informative_alone"] and enough:
        return True, "accepted on informative groups alone: " + "; ".join(wrong)
    return False, "; ".join(wrong)
