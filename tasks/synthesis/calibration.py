"""Check 4 of the method's section 4: how a policy (the base, or a champion that is to be trained on) fares in a
synthesized environment, and whether that may train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from db import CalibrationRow, Store, row_id
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.written import WrittenEnvironment
from environments.validation.checks import Limits
from errors import EnvironmentFault
from models.episodes import Episode
from settings import CalibrationSettings, Settings
from tasks.measuring.statistics import clustered_interval
from tasks.round.engine import Playground
from tasks.round.rollouts import RoundEngine, outcomes, round_seed

# A capability's own scenarios have their own seeds (`own_scenario`), which training never draws. Calibration counts
# down from -1. What chooses a checkpoint is not what it is reported on, or the report would have the winner's luck.
CALIBRATION_SEED = -1
FRESH_SEED = 5_000_000
CHOOSING_SEED = 5_050_000
# Each round has this many of each kind, further from 0 with its number; a round's training has `round_seed`.
ROUND_SEEDS = 100_000
FIGURES = ("mean_reward", "success_rate", "std_reward", "all_success", "all_zero", "informative", "low", "high")


def seed_offset(number: int) -> int:
    """What is added to FRESH_SEED and CHOOSING_SEED, and taken from CALIBRATION_SEED, in round `number` (from 1)."""
    return ROUND_SEEDS * (number - 1)


@dataclass(frozen=True)
class Calibration:
    """What was measured (see `calibration_figures`), the decision and its reason, success by family, and the worst, the
    median and the best episode (JSON-able, for whoever must make the environment better)."""

    figures: Mapping[str, float]
    accepted: bool
    reason: str
    seeds: int
    samples: int
    policy_id: str
    families: Mapping[str, float]
    exhibits: tuple[Mapping[str, Any], ...] = ()

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
    engine: RoundEngine,
    settings: Settings,
    environment: ComposedEnvironment | WrittenEnvironment,
    adapter: str | None = None,
    number: int = 1,
) -> Calibration:
    """Play a policy `samples` times on each of `seeds` scenarios of round `number`, and judge the figures.

    What plays is the engine's policy: bare, or with the `adapter` of that name, which is loaded; its training would go
    on from there. Raises `EnvironmentFault` when no episode ended.
    """
    s, store = settings.calibration, engine.engine.store
    tasks = [environment.own_scenario(CALIBRATION_SEED - seed_offset(number) - i) for i in range(s.seeds)]
    ground = Playground(
        environment.environment,
        environment.spec.id,
        "calibration",
        settings.train.temperature,
        settings.rollout.max_tokens,
    )
    seed = round_seed(settings.seed, number)
    episodes = [Episode("", t, seed, k, adapter) for t in tasks for k in range(s.samples)]
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
    played = engine.engine.policy.identity(adapter).id
    shown = typical_episodes(store, frame)
    return Calibration(figures, accepted, reason, len(tasks), s.samples, played, families, shown)


def typical_episodes(store: Store, frame: pd.DataFrame) -> tuple[dict[str, Any], ...]:
    """The worst, the median and the best episode of `frame` (of `outcomes`) by reward: name, reward, success, checks
    and messages, without the prompt. Fewer where there are fewer episodes."""
    order = list(frame.sort_values(["reward", "success", "id"])["id"])
    places = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    chosen: dict[str, str] = {}
    for name, identity in places.items():
        chosen.setdefault(identity, name)
    said = {row.id: row.messages for row in store.trajectories(None, id=list(chosen))}
    by_id = frame.set_index("id")
    shown = []
    for identity, name in chosen.items():
        checks = store.check_frame(None, id=identity)[["name", "required", "passed", "detail"]]
        shown.append(
            {
                "name": f"the agent that will train, {name} episode",
                "reward": float(by_id["reward"][identity]),
                "success": bool(by_id["success"][identity]),
                "checks": [
                    {
                        "name": str(c.name),
                        "required": bool(c.required),
                        "passed": bool(c.passed),
                        "detail": str(c.detail),
                    }
                    for c in checks.head(20).itertuples(index=False)
                ],
                "messages": [m for m in said[identity] if m["role"] != "system"],
            }
        )
    return tuple(shown)


def band_text(s: CalibrationSettings) -> str:
    """What `judge` asks of the figures, in words for the author of an environment."""
    text = (
        f"The agent that will train plays {s.seeds} scenarios {s.samples} times each behind the target's own prompt. "
        f"Its mean reward and its success rate must each lie in [{s.low:g}, {s.high:g}], and the standard deviation of "
        f"its rewards be at least {s.spread:g}. At most {s.uniform:.0%} of the scenarios may be solved in all their "
        f"episodes, and at most {s.uniform:.0%} earn nothing in any; in at least {s.informative:.0%} the episodes must "
        "differ in reward. An environment that is too hard is made easier around the capability (shorter requests, "
        "fewer records, fewer other steps), never by letting an agent without it succeed."
    )
    if s.informative_alone:
        text += (
            f" Success below {s.low:g} is accepted as long as the share of scenarios whose episodes differ and the "
            "spread are reached."
        )
    return text


def calibration_figures(rewards: list[Any], wins: list[Any]) -> dict[str, float]:
    """Figures over groups (one array per seed).

    Means, spread, shares of uniform and of informative groups, and the interval of success, clustered by seed: the
    samples of a scenario are alike, so 8 scenarios of 8 samples are nearer to 8 observations than to 64.
    """
    flat, won = np.concatenate(rewards), np.concatenate(wins)
    success = clustered_interval(won.astype(float), np.repeat(np.arange(len(wins)), [len(w) for w in wins]))
    return {
        "mean_reward": float(flat.mean()),
        "success_rate": float(won.mean()),
        "std_reward": float(flat.std()),
        "all_success": float(np.mean([w.all() for w in wins])),
        "all_zero": float(np.mean([not r.any() for r in rewards])),
        "informative": float(np.mean([np.ptp(r) > 1e-6 for r in rewards])),
        "low": success.low,
        "high": success.high,
    }


def is_mastered(figures: Mapping[str, float]) -> bool:
    """Whether every group was solved throughout: there is nothing to learn, and no group that could tell rollouts
    apart."""
    return figures["all_success"] >= 1.0


def judge(figures: dict[str, float], rule: dict[str, Any]) -> tuple[bool, str]:
    """Whether the figures allow training, and the reason in words."""
    if is_mastered(figures):
        return False, "mastered: every sample of every scenario succeeded, so there is nothing to train"
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
