"""Check 4 of the method's section 4: how a policy (the base, or a champion that is to be trained on) fares in a
synthesized environment, and whether that may train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from db import CalibrationRow, row_id
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import Advised, advised
from environments.synthesized.written import WrittenEnvironment
from environments.validation.checks import Limits
from errors import EnvironmentFault
from models.episodes import Episode
from settings import CalibrationSettings, Settings
from tasks.measuring.statistics import clustered_interval
from tasks.round.engine import Playground
from tasks.round.rollouts import RoundEngine, outcomes, round_seed
from tasks.synthesis.calibration_told import typical_episodes

# A capability's own scenarios have their own seeds (`own_scenario`), which training never draws. Calibration counts
# down from -1. What chooses a checkpoint is not what it is reported on, or the report would have the winner's luck.
CALIBRATION_SEED = -1
FRESH_SEED = 5_000_000
CHOOSING_SEED = 5_050_000
# Each round has this many of each kind, further from 0 with its number; a round's training has `round_seed`.
ROUND_SEEDS = 100_000
# Success with advice from which a capability that is never shown without may be trained with hints: of four rollouts
# of a group, one in three groups has a success to learn from.
HINTED = 0.1
# What the trajectories of episodes with advice are grouped by.
HINT = "hinted"
FIGURES = ("mean_reward", "success_rate", "std_reward", "all_success", "all_zero", "informative", "low", "high")


def seed_offset(number: int) -> int:
    """What is added to FRESH_SEED and CHOOSING_SEED, and taken from CALIBRATION_SEED, in round `number` (from 1)."""
    return ROUND_SEEDS * (number - 1)


@dataclass(frozen=True)
class Calibration:
    """What was measured (see `calibration_figures`), the decision and its reason, success by family, success with
    advice where there was none without (None: not tried), and the worst, the median and the best episode (JSON-able,
    for who must make the environment better)."""

    figures: Mapping[str, float]
    accepted: bool
    reason: str
    seeds: int
    samples: int
    policy_id: str
    families: Mapping[str, float]
    hinted: float | None = None
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
            detail={
                "families": dict(self.families),
                **({} if self.hinted is None else {"hinted": self.hinted}),
            },
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
    on from there. Where it never succeeds it plays once more with advice (`environments/synthesized/hints.py`). Raises
    `EnvironmentFault` when no episode ended.
    """
    s = settings.calibration
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
    frame = _played(engine, ground, episodes, f"calibrate {environment.spec.capability}")
    rewards = [frame[frame["task"] == t.id]["reward"].to_numpy() for t in tasks]
    wins = [frame[frame["task"] == t.id]["success"].to_numpy() for t in tasks]
    figures = calibration_figures([r for r in rewards if len(r)], [w for w in wins if len(w)])
    accepted, reason = judge(figures, s.model_dump())
    families = {str(k): float(v) for k, v in frame.groupby("family")["success"].mean().items()}
    hinted = None
    if not accepted and not figures["success_rate"] and settings.train.hints:
        hinted = _with_advice(engine, ground, environment, episodes)
    if hinted is not None:
        accepted = hinted >= HINTED
        found = f"with advice {100 * hinted:.0f} % of the episodes succeed"
        reason = (
            f"accepted with hints: {found}, without none ({reason})"
            if accepted
            else f"{reason}; {found}, at least {100 * HINTED:.0f} % are needed to train with hints"
        )
    played = engine.engine.policy.identity(adapter).id
    shown = typical_episodes(engine.engine.store, frame)
    return Calibration(figures, accepted, reason, len(tasks), s.samples, played, families, hinted, shown)


def _played(engine: RoundEngine, ground: Playground, episodes: list[Episode], what: str) -> pd.DataFrame:
    """Outcomes of calibration episodes. Raises `EnvironmentFault` when all were lost."""
    ids, store = engine.play(ground, episodes, what), engine.engine.store
    frame = outcomes(store, ids)
    if frame.empty:
        first = store.trajectory_frame(None, id=ids[:1])["error"].iloc[0]
        raise EnvironmentFault(f"all {len(ids)} calibration episodes were lost to errors; the first: {first}")
    return frame


def _with_advice(
    engine: RoundEngine,
    ground: Playground,
    environment: ComposedEnvironment | WrittenEnvironment,
    episodes: list[Episode],
) -> float | None:
    """Success on the same scenarios when the policy is advised; None where there is no advice to give."""
    advice = {e.task.id: environment.advice(e.task) for e in episodes}
    told = [replace(e, task=advised(e.task, advice[e.task.id])) for e in episodes if advice[e.task.id]]
    if not told:
        return None
    shown = replace(ground, make=lambda: Advised(environment.environment()), scope=f"{ground.where}|{HINT}", group=HINT)
    frame = _played(engine, shown, told, f"calibrate {environment.spec.capability} with advice")
    return float(frame["success"].mean())


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
