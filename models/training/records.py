"""The settings of a training, the record of each step, and what the records say of it: how it ends, and at which level
of difficulty it goes on.

The level of a step follows from the record of the step before it, which a checkpoint holds: a training that goes on
from a checkpoint is at the level that it would have been at.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from scipy import special

from errors import Untrainable

# Nats a token, and distance of the mean ratio from 1: beyond these the trainer learns from what another model did.
GAP_ALARM, RATIO_ALARM = 0.1, 0.1
# Records from which reward and success are compared: in one step a reward may well rise before success follows.
LEAST_RECORDS = 3
LEAST_SPREAD = 0.05
# Success on own scenarios, without advice, from which the next step is a level harder, and up to which it is easier:
# the ends of the band that calibration asks for. Between them groups have the most to tell.
HARDER, EASIER = 0.6, 0.2
# How a training ends of which all steps were made.
MADE = "steps"
logger = logging.getLogger("trace.models")


@dataclass(frozen=True)
class TrainingSettings:
    """Hyper-parameters, by default those of `settings_parts.py`; the published ones, but the rate: profiles/gpu.toml.

    `most_episodes` may be played in all (None: as many as the steps need). `shuffled` deals the advantages of a group
    out at random: a placebo, from which nothing about the task can be learnt. Advantages are `scaled` to their group's
    standard deviation, or not; `delta` bounds the ratio of a token whose advantage is negative (0: no bound).
    `hints` is the share of a group's rollouts that get advice while the policy hardly succeeds without. `patience` is
    how many further collections a step may make as long as no group was informative: a training on tasks that are
    mostly solved would end there while its budget is hardly used. A training that is `judged` ends where reward parts
    from success, which sends its environment back to be made anew; one that has none to send back is not. A backward
    pass has `micro_batch` rows (on a CPU as many as have no more tokens than so many of the longest), or with
    `micro_batch_tokens` as many as have so many tokens; with `recompute` it computes again what it would have kept."""

    steps: int = 8
    groups: int = 6
    group_size: int = 8
    collections: int = 3
    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-3
    schedule: str = "constant"
    clip_low: float = 0.2
    clip_high: float = 0.28
    temperature: float = 0.7
    max_tokens: int = 32
    upper_layers: int | None = 15
    micro_batch: int = 24
    solved: float = 0.95
    seed: int = 0
    most_episodes: int | None = None
    shuffled: bool = False
    scaled: bool = True
    delta: float = 0.0
    hints: float = 0.0
    patience: int = 0
    micro_batch_tokens: int | None = None
    recompute: bool = False
    judged: bool = True

    def as_json(self) -> dict[str, Any]:
        """As they are stored with an adapter, where a training that is `judged` says nothing of it."""
        return {name: value for name, value in asdict(self).items() if name != "judged" or not value}


def step_seed(seed: int, step: int) -> int:
    """The seed of the episodes of a step (from 0) of a training with this `seed`; they are stored with it."""
    return seed * 100_003 + step


@dataclass(frozen=True)
class GroupFigures:
    """What the rollouts of one scenario came to: `own` when the scenario needs the capability (a retention scenario
    otherwise), the episodes that were scored, how many of them succeeded, their mean reward, and the scenario's family
    ("" where it was stored before families were)."""

    own: bool
    episodes: int
    successes: int
    reward: float
    family: str = ""

    @property
    def success(self) -> float:
        """Share of the episodes that succeeded."""
        return self.successes / self.episodes


@dataclass(frozen=True)
class StepRecord:
    """Figures of one optimizer step, whose rollouts the checkpoint before it played. `groups` has every scenario that
    was collected, whether its group was learnt from or not; `metrics` has their figures, own and retention apart."""

    step: int
    loss: float
    clip_fraction: float
    kl: float
    logprob_gap: float
    seconds: float
    groups: tuple[GroupFigures, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, stored: dict[str, Any]) -> StepRecord:
        """A record from what `asdict` made of it."""
        return cls(**{**stored, "groups": tuple(GroupFigures(**g) for g in stored["groups"])})

    @property
    def level(self) -> int:
        """The level of difficulty of its own scenarios; 0 where there are no levels."""
        return int(self.metrics.get("level", 0))

    @property
    def own_groups(self) -> list[GroupFigures]:
        """The groups on the capability's own scenarios."""
        return [g for g in self.groups if g.own]

    @property
    def reward(self) -> float | None:
        """Mean reward of the episodes on the capability's own scenarios; None where every one of them was lost."""
        means = episode_means(self.own_groups)
        return means[0] if means else None

    @property
    def success(self) -> float | None:
        """Share of the episodes on the capability's own scenarios that succeeded; None where all were lost."""
        means = episode_means(self.own_groups)
        return means[1] if means else None


def episode_means(groups: Sequence[GroupFigures]) -> tuple[float, float] | None:
    """Mean reward and success over the episodes of `groups`; None without an episode."""
    episodes = sum(g.episodes for g in groups)
    if not episodes:
        return None
    return sum(g.reward * g.episodes for g in groups) / episodes, sum(g.successes for g in groups) / episodes


def figures_apart(groups: Sequence[GroupFigures]) -> dict[str, float]:
    """Reward, success and number of episodes on own and on retention scenarios; without those that have no episode."""
    found: dict[str, float] = {}
    for name, own in (("own", True), ("retention", False)):
        part = [g for g in groups if g.own is own]
        found[f"{name}_episodes"] = float(sum(g.episodes for g in part))
        if means := episode_means(part):
            found[f"{name}_reward"], found[f"{name}_success"] = means
    return found


def gap_alarm(record: StepRecord) -> str:
    """What is wrong between sampler and trainer, also logged; "" when they agree.

    Before the first update of a batch both are the same policy: their log-probabilities differ by rounding alone.
    """
    ratio = record.metrics.get("sampler_ratio", 1.0)
    if record.logprob_gap <= GAP_ALARM and abs(ratio - 1) <= RATIO_ALARM:
        return ""
    alarm = (
        f"step {record.step}: sampler and trainer are {record.logprob_gap:.3f} nats apart a token, ratio {ratio:.3f} "
        f"(alarm at {GAP_ALARM} and 1 +- {RATIO_ALARM}); serve the trained base in the trainer's dtype, with "
        "--logprobs-mode processed_logprobs"
    )
    logger.warning("%s", alarm)
    return alarm


def solved(records: Sequence[StepRecord], share: float, top: int = 0) -> bool:
    """Whether the capability's own scenarios were solved in two steps running at the `top` level: at least `share` of
    them, on average."""
    last = [r.success for r in records[-2:] if r.success is not None and r.level == top]
    return len(last) == 2 and sum(last) / 2 >= share


def misspecified(records: Sequence[StepRecord], least: int = LEAST_RECORDS) -> str:
    """Why training must stop because reward and success part ways on the capability's own scenarios; "" while they do
    not, and before there are `least` records.

    Compared are the first and the last records, up to half of all and at most three each. Reward must be up by 0.2
    with success flat (less than 0.05 up), and the 95 % interval of how much further reward rose than success must lie
    above 0. That is Welch's interval with a scenario as one observation: what near misses earn varies from scenario to
    scenario, and with few of them a difference alone is noise. Levels of difficulty are not compared with one another:
    only the records of the last one's level count.
    """
    records = [r for r in records if r.level == records[-1].level]
    window = min(3, len(records) // 2)
    if window < 1 or len(records) < least:
        return ""
    early = [g for r in records[:window] for g in r.own_groups]
    late = [g for r in records[-window:] for g in r.own_groups]
    if min(len(early), len(late)) < 2:
        return ""
    (reward, success), (later_reward, later_success) = episode_means(early) or (0, 0), episode_means(late) or (0, 0)
    if later_reward - reward < 0.2 or later_success - success >= 0.05:
        return ""
    if _rise_at_least([g.reward - g.success for g in early], [g.reward - g.success for g in late]) <= 0:
        return ""
    return (
        f"reward-misspecified: reward rose by {later_reward - reward:.2f} while success rose by "
        f"{later_success - success:.2f}"
    )


def _rise_at_least(early: Sequence[float], late: Sequence[float]) -> float:
    """Lower end of Welch's 95 % interval of the rise of the mean. Two scenarios may be alike by chance: none is taken
    to vary by less than `LEAST_SPREAD`."""
    parts = [max(LEAST_SPREAD, statistics.stdev(values)) ** 2 / len(values) for values in (early, late)]
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (early, late), strict=True))
    rise = statistics.fmean(late) - statistics.fmean(early)
    return float(rise - special.stdtrit(freedom, 0.975) * math.sqrt(sum(parts)))


def verdict_on(records: Sequence[StepRecord], settings: TrainingSettings) -> str:
    """What is wrong with the environment; a training of two steps is judged after two. "" where it is not `judged`."""
    return misspecified(records, min(LEAST_RECORDS, settings.steps)) if settings.judged else ""


def over(records: Sequence[StepRecord], settings: TrainingSettings, levels: int) -> str:
    """How a training on so many `levels` ended by its records, a checkpoint being there: "" while it goes on."""
    if verdict_on(records, settings):
        return "misspecified"
    if solved(records, settings.solved, levels - 1):
        return "solved"
    return MADE if len(records) >= settings.steps else ""


def come_apart(step: int) -> Untrainable:
    """What ends a training whose adapter is no number any more."""
    return Untrainable(
        f"the adapter after step {step} gives log-probabilities that are not finite; lower the learning rate and start "
        "this adapter again"
    )


@runtime_checkable
class Dialled(Protocol):
    """A source of scenarios that is at `level` (0: the easiest) of `levels`; `at` gives the same one at another."""

    level: int
    levels: int

    def at(self, level: int) -> Self: ...


@runtime_checkable
class Allowed(Protocol):
    """A source that is asked before a step's first episode whether it may have so many, and raises where not. `seed` is
    theirs, of each step another: a step that is begun again has some of them already."""

    def allow(self, episodes: int, seed: int) -> None: ...


def levels_of(source: object) -> tuple[int, int]:
    """(level that a training begins at, number of levels); (0, 1) for a source without levels."""
    return (source.level, source.levels) if isinstance(source, Dialled) else (0, 1)


def following_level(record: StepRecord, levels: int) -> int:
    """The level of the step after `record`: at most one up or down."""
    if record.success is None:
        return record.level
    if record.success >= HARDER:
        return min(record.level + 1, levels - 1)
    return max(record.level - 1, 0) if record.success <= EASIER else record.level
