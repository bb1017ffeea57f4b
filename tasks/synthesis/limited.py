"""A training that the round's limits can stop between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from environments.contract import Environment, Message, TargetTask
from environments.synthesized.written import WrittenEnvironment
from tasks.synthesis.environments import TrainingEnvironment
from tasks.unattended.limits import RoundLimits


@dataclass(frozen=True)
class Limited:
    """What training draws from, while the round's limits allow another step: a step is refused before its first
    episode, when the checkpoint of the one before is whole. `adapter` is what is trained."""

    source: TrainingEnvironment
    limits: RoundLimits
    adapter: str

    def allow(self, episodes: int, seed: int) -> None:
        """Raises `LimitReached` where a step that begins with so many episodes may not be made. Those that the round
        has of it already, from a process that died in it, are played again in their own place and count once."""
        self.limits.check(max(0, episodes - self.limits.trained(self.adapter, seed)))

    def scenario(self, seed: int) -> TargetTask:
        return self.source.scenario(seed)

    def own(self, task: TargetTask) -> bool:
        return self.source.own(task)

    def advice(self, task: TargetTask) -> Sequence[Message]:
        return self.source.advice(task)

    def environment(self) -> Environment:
        return self.source.environment()


@dataclass(frozen=True)
class LimitedDial(Limited):
    """The same of a source with levels."""

    source: WrittenEnvironment

    @property
    def level(self) -> int:
        return self.source.level

    @property
    def levels(self) -> int:
        return self.source.levels

    def at(self, level: int) -> LimitedDial:
        return replace(self, source=self.source.at(level))


def limited(source: TrainingEnvironment, limits: RoundLimits, adapter: str) -> Limited:
    """`source`, from which no step of the adapter's training is made that the round's limits do not allow."""
    if isinstance(source, WrittenEnvironment):
        return LimitedDial(source, limits, adapter)
    return Limited(source, limits, adapter)
