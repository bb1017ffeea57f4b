"""Check 4 of the method's section 4: how a policy (the base, or a champion that is to be trained on) fares in a
synthesized environment, and whether that may train."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd

from db import CalibrationRow, row_id
from environments.contract import TargetTask
from environments.sandbox.workers import NOT_STARTED, WorkerNotStarted
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.hints import Advised, advised
from environments.synthesized.written import WrittenEnvironment
from environments.validation.checks import Limits
from errors import EnvironmentFault
from models.episodes import Episode
from models.training.rollouts import UNHINTED
from settings import Settings
from settings_parts import CalibrationSettings
from tasks.measuring.statistics import clustered_interval
from tasks.round.engine import Playground
from tasks.round.rollouts import RoundEngine, outcomes, round_seed
from tasks.synthesis.author_feedback import typical_episodes

# A capability's own scenarios have their own seeds (`own_scenario`), which training never draws. Calibration counts
# down from -1. What chooses a checkpoint is not what it is reported on, or the report would have the winner's luck.
CALIBRATION_SEED = -1
FRESH_SEED = 5_000_000
CHOOSING_SEED = 5_050_000
# What a training begins from is not chosen on what its checkpoints are chosen on. It is this far away because retention
# scenarios are looked for over a longer range; choosing would meet it in round 9,951.
CARRY_SEED = 1_000_000_000
# Each round has this many of each kind, further from 0 with its number; a round's training has `round_seed`.
ROUND_SEEDS = 100_000
# Success with advice from which a policy may be trained with hints: of four rollouts of a group, one in five groups has
# a success to learn from.
HINTED = 0.05
# What the trajectories of episodes with advice are grouped by.
HINT = "hinted"
WITHIN = "within the band"
# With `train.focus` the least weight of a family, and the success of one of which nothing is known.
LEAST, UNKNOWN = 0.04, 0.5
FIGURES = ("mean_reward", "success_rate", "std_reward", "all_success", "all_zero", "informative", "low", "high")


def focus_weights(families: Sequence[str], rates: Mapping[str, float], hinted: bool = False) -> tuple[float, ...]:
    """How often a training with `train.focus` draws each of these families: by what there is to learn in it, the
    variance of its success, or with advice at least that of a family which still gets it, and a little for all. A group
    of rollouts that all succeed, or all fail, teaches nothing."""
    known = [max(rates.get(family, UNKNOWN), UNHINTED if hinted else 0.0) for family in families]
    return tuple(round(rate * (1 - rate) + LEAST, 3) for rate in known)


def seed_offset(number: int) -> int:
    """What is added to FRESH_SEED, CHOOSING_SEED and CARRY_SEED, and taken from CALIBRATION_SEED, in round `number`
    (from 1)."""
    return ROUND_SEEDS * (number - 1)


@dataclass(frozen=True)
class Calibration:
    """What was measured (see `calibration_figures`), the decision and its reason, success by family, success with
    advice where there was none without (None: not tried), and the worst, the median and the best episode (JSON-able,
    for who must make the environment better). Of an environment with levels: the one that the figures are of, and
    success and reason of each that was played. `known` is the success by family that its scenarios were drawn by."""

    figures: Mapping[str, float]
    accepted: bool
    reason: str
    seeds: int
    samples: int
    policy_id: str
    families: Mapping[str, float]
    hinted: float | None = None
    exhibits: tuple[Mapping[str, Any], ...] = ()
    level: int | None = None
    by_level: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    known: Mapping[str, float] | None = None

    def row(self, environment_id: str, start: str | None = None) -> CalibrationRow:
        """What the store keeps of it; `start` is the id of the adapter that played ("": the base)."""
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
                **({} if self.known is None else {"known": dict(self.known)}),
                **({} if start is None else {"start": start}),
                **({} if self.hinted is None else {"hinted": self.hinted}),
                **({} if self.level is None else {"level": self.level, "levels": dict(self.by_level)}),
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
    known: Mapping[str, float] | None = None,
) -> Calibration:
    """Play a policy `samples` times on each of `seeds` scenarios of round `number`, and judge the figures. With success
    by family `known`, scenarios are drawn by family as a training with `train.focus` draws them (`focus_weights`).

    What plays is the engine's policy: bare, or with the `adapter` of that name, which is loaded; its training would go
    on from there. Of an environment with levels the one is looked for at which it may train (`find_level`). Where it
    succeeds more rarely than the band has it, at the easiest level, it plays once more with advice
    (`environments/synthesized/hints.py`). Raises `EnvironmentFault` when no episode ended.
    """
    bench = _Bench(engine, settings, adapter, number, known)
    if isinstance(environment, WrittenEnvironment) and environment.levels > 1:
        found = find_level(environment.levels, bench.plain_at(environment), settings.calibration)
        environment = environment.at(found.level or 0)
    else:
        found = bench.plain(environment)
    rarely = found.reason != WITHIN and not found.level and found.figures["success_rate"] < settings.calibration.low
    return bench.with_advice(environment, found) if rarely and settings.train.hints else found


def calibration_tasks(
    environment: ComposedEnvironment | WrittenEnvironment,
    count: int,
    number: int,
    known: Mapping[str, float] | None = None,
) -> list[TargetTask]:
    """The scenarios that round `number` calibrates on, each once: of what has few, several seeds may give the same.
    With success by family `known` each family has the share that training gives it: chance would often leave out the
    one that is still lacking, and calibrate on what is mastered."""
    drawn = _drawn(environment, count, number, known)
    return list({task.id: task for task in drawn}.values())


def _drawn(
    environment: ComposedEnvironment | WrittenEnvironment,
    count: int,
    number: int,
    known: Mapping[str, float] | None,
) -> list[TargetTask]:
    """A scenario for each of `count` seeds of the round, as `calibration_tasks` says."""
    seeds = [CALIBRATION_SEED - seed_offset(number) - i for i in range(count)]
    if known is None or not isinstance(environment, ComposedEnvironment):
        return [environment.own_scenario(seed) for seed in seeds]
    families = environment.spec.families
    until = list(accumulate(focus_weights(families, known)))
    places = [until[-1] * (i + 0.5) / count for i in range(count)]
    return [
        environment.own_scenario(seed, families[bisect(until, place)])
        for seed, place in zip(seeds, places, strict=True)
    ]


@dataclass(frozen=True)
class _Bench:
    """What plays a calibration, in which round, and success by family that is known before."""

    engine: RoundEngine
    settings: Settings
    adapter: str | None
    number: int
    known: Mapping[str, float] | None = None

    def plain(self, environment: ComposedEnvironment | WrittenEnvironment) -> Calibration:
        """Figures and decision without advice."""
        s, tasks = self.settings.calibration, self._tasks(environment)
        what = f"calibrate {environment.spec.capability}"
        frame = self._played(self._ground(environment), self._episodes(tasks), what)
        rewards = [frame[frame["task"] == t.id]["reward"].to_numpy() for t in tasks]
        wins = [frame[frame["task"] == t.id]["success"].to_numpy() for t in tasks]
        figures = calibration_figures([r for r in rewards if len(r)], [w for w in wins if len(w)])
        accepted, reason = judge(figures, s.model_dump())
        families = {str(k): float(v) for k, v in frame.groupby("family")["success"].mean().items()}
        played = self.engine.engine.policy.identity(self.adapter).id
        shown = typical_episodes(self.engine.engine.store, frame)
        level = environment.level if isinstance(environment, WrittenEnvironment) and environment.levels > 1 else None
        return Calibration(
            figures, accepted, reason, len(tasks), s.samples, played, families,
            exhibits=shown, level=level, known=self.known,
        )  # fmt: skip

    def plain_at(self, environment: WrittenEnvironment) -> Callable[[int], Calibration]:
        """`plain` by level."""
        return lambda level: self.plain(environment.at(level))

    def with_advice(self, environment: ComposedEnvironment | WrittenEnvironment, plain: Calibration) -> Calibration:
        """`plain`, or trained with hints by success on the same scenarios when the policy is advised: enough of it, and
        twice what it is without. As it is where there is no advice to give."""
        episodes = self._episodes(self._tasks(environment))
        advice = {task.id: environment.advice(task) for task in {e.task.id: e.task for e in episodes}.values()}
        told = [replace(e, task=advised(e.task, advice[e.task.id])) for e in episodes if advice[e.task.id]]
        if not told:
            return plain
        ground = self._ground(environment)
        shown = replace(
            ground, make=lambda: Advised(environment.environment()), scope=f"{ground.where}|{HINT}", group=HINT
        )
        frame = self._played(shown, told, f"calibrate {environment.spec.capability} with advice")
        hinted = float(frame["success"].mean())
        alone, needed = plain.figures["success_rate"], max(HINTED, 2 * plain.figures["success_rate"])
        found = f"with advice {100 * hinted:.0f} % of the episodes succeed"
        if hinted >= needed:
            reason = f"accepted with hints: {found}, without {100 * alone:.0f} % ({plain.reason})"
            return replace(plain, accepted=True, reason=reason, hinted=hinted)
        reason = f"{plain.reason}; {found}, at least {100 * needed:.0f} % are needed to train with hints"
        return replace(plain, reason=reason, hinted=None if plain.accepted else hinted)

    def _tasks(self, environment: ComposedEnvironment | WrittenEnvironment) -> list[TargetTask]:
        return calibration_tasks(environment, self.settings.calibration.seeds, self.number, self.known)

    def _episodes(self, tasks: Sequence[TargetTask]) -> list[Episode]:
        seed, samples = round_seed(self.settings.seed, self.number), self.settings.calibration.samples
        return [Episode("", t, seed, k, self.adapter) for t in tasks for k in range(samples)]

    def _ground(self, environment: ComposedEnvironment | WrittenEnvironment) -> Playground:
        s = self.settings
        return Playground(
            environment.environment, environment.spec.id, "calibration", s.train.temperature, s.rollout.max_tokens
        )

    def _played(self, ground: Playground, episodes: list[Episode], what: str) -> pd.DataFrame:
        """Outcomes of calibration episodes. When all were lost it raises `EnvironmentFault`, or `WorkerNotStarted`
        where the machine started no worker for one of them, which says nothing of a module."""
        ids, store = self.engine.play(ground, episodes, what), self.engine.engine.store
        frame = outcomes(store, ids)
        if frame.empty:
            errors = [str(error) for error in store.trajectory_frame(None, columns=["error"], id=ids)["error"]]
            if unstarted := [error for error in errors if error.startswith(NOT_STARTED)]:
                raise WorkerNotStarted(unstarted[0].removeprefix(f"{NOT_STARTED}: "))
            first = errors[0]
            raise EnvironmentFault(f"all {len(ids)} calibration episodes were lost to errors; the first: {first}")
        return frame


def find_level(levels: int, play: Callable[[int], Calibration], rule: CalibrationSettings) -> Calibration:
    """The calibration at the level at which a policy may train, of `levels` that `play` measures (`level` is set).

    Harder levels are taken to have less success: from the middle on, one with success above the middle of the band is
    followed by a harder one, else by an easier one, until one lies within the band or none is left. Then the accepted
    one that is nearest to the middle is taken; where none is, the nearest of all, with the reasons of each that was
    played.
    """
    middle = (rule.low + rule.high) / 2
    low, high, tried = 0, levels - 1, dict[int, Calibration]()
    while low <= high:
        level = (low + high) // 2
        found = tried[level] = play(level)
        if found.reason == WITHIN:
            break
        low, high = (level + 1, high) if found.figures["success_rate"] > middle else (low, level - 1)
    order = [tried[level] for level in sorted(tried)]

    def distance(found: Calibration) -> tuple[float, ...]:
        success = found.figures["success_rate"]
        level = found.level or 0
        return found.reason != WITHIN, abs(success - middle), -level if success > middle else level

    best = min([found for found in order if found.accepted] or order, key=distance)
    figures = {f.level: {"success_rate": f.figures["success_rate"], "reason": f.reason} for f in order}
    at = f"level {best.level} of {levels}"
    if best.accepted:
        reason = f"{best.reason} at {at}"
    else:
        reason = "no level is informative: " + "; ".join(f"level {f.level}: {f.reason}" for f in order)
    return replace(best, reason=reason, by_level={str(level): row for level, row in figures.items()})


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
        return True, WITHIN
    enough = (
        figures["informative"] >= rule["informative"]
        and figures["std_reward"] >= rule["spread"]
        and 0 < figures["success_rate"] <= rule["high"]
    )
    if rule["informative_alone"] and enough:
        return True, "accepted on informative groups alone: " + "; ".join(wrong)
    return False, "; ".join(wrong)
