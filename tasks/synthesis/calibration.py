"""Check 4 of the method's section 4: how the base fares in a synthesized environment, and whether that may train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from db import CalibrationRow, Store, row_id
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.written import WrittenEnvironment
from environments.validation.checks import Limits, wilson_interval
from errors import EnvironmentFault
from models.episodes import Episode
from settings import CalibrationSettings, Settings
from tasks.round.engine import Playground
from tasks.round.rollouts import RoundEngine, outcomes

# Calibration seeds count down from here: training counts up from 0, fresh evaluation from FRESH.
CALIBRATION_SEED = -1
FRESH_SEED = 5_000_000
FIGURES = ("mean_reward", "success_rate", "std_reward", "all_success", "all_zero", "informative", "low", "high")


@dataclass(frozen=True)
class Calibration:
    """What was measured (see `calibration_figures`), the decision and its reason, and success by family."""

    figures: Mapping[str, float]
    accepted: bool
    reason: str
    seeds: int
    samples: int
    policy_id: str
    families: Mapping[str, float]

    def row(self, environment_id: str) -> CalibrationRow:
        """What the store keeps of it."""
        return CalibrationRow(
            id=row_id(environment_id, "calibration"),
            environment_id=environment_id,
            policy_id=self.policy_id,
            seeds=self.seeds,
            samples=self.samples,
            **{name: self.figures[name] for name in FIGURES},
            accepted=self.accepted,
            reason=self.reason,
            detail={"families": dict(self.families)},
        )


def limits_of(settings: CalibrationSettings) -> Limits:
    """Sample sizes of validation."""
    return Limits(
        distinct=settings.distinct,
        searched=2 * settings.distinct,
        episodes=settings.policy_episodes,
        attack_seeds=2,
        replayed=10,
    )


def measure(
    store: Store,
    engine: RoundEngine,
    policy_id: str,
    settings: Settings,
    environment: ComposedEnvironment | WrittenEnvironment,
) -> Calibration:
    """Play the base `samples` times on each of `seeds` scenarios and judge the figures.

    `engine` plays the base, `policy_id` is what it is stored as. Raises `EnvironmentFault` when no episode ended.
    """
    s = settings.calibration
    tasks = [environment.own_scenario(CALIBRATION_SEED - i) for i in range(s.seeds)]
    ground = Playground(
        environment.environment,
        environment.spec.id,
        "calibration",
        settings.train.temperature,
        settings.rollout.max_tokens,
    )
    episodes = [Episode("", t, settings.seed, k) for t in tasks for k in range(s.samples)]
    ids = engine.play(ground, episodes, f"calibrate {environment.spec.capability}")
    frame = outcomes(store, ids)
    if frame.empty:
        first = store.trajectory_frame(None, id=ids[:1])["error"].iloc[0]
        raise EnvironmentFault(f"all {len(ids)} calibration episodes were lost to errors; the first: {first}")
    rewards = [frame[frame["task"] == t.id]["reward"].to_numpy() for t in tasks]
    wins = [frame[frame["task"] == t.id]["success"].to_numpy() for t in tasks]
    figures = calibration_figures([r for r in rewards if len(r)], [w for w in wins if len(w)])
    accepted, reason = judge(figures, s.model_dump())
    families = {str(k): float(v) for k, v in frame.groupby("family")["success"].mean().items()}
    return Calibration(figures, accepted, reason, len(tasks), s.samples, policy_id, families)


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
