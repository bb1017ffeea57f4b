"""Synthesized environments of the kind `generators`: new scenarios from the target's own generators.

A share of the scenarios are *retention scenarios*, drawn from families that the base already masters and in which
another action is right: without them an adapter learns that nothing else is ever asked. The reward is denser than the
target's: near misses earn a little, and what is wrong or superfluous costs as much as what is right earns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count

from environments.contract import (
    Action,
    Environment,
    Generators,
    Message,
    Observation,
    Score,
    Target,
    TargetTask,
    ToolCall,
    content_hash,
)
from environments.playing import for_one_episode
from environments.scores import checked_score
from environments.synthesized.drawing import first_made
from environments.synthesized.hints import solved
from environments.synthesized.references import References
from environments.wrapping import WrappedEnvironment
from errors import ConfigurationError

# The most that an episode without success can earn. Each further version of an environment halves it: the one before
# was withdrawn because training learnt to come near instead of to succeed.
NEAR_MISS = 0.5
# How near to a success an episode without one can come: also one that did all that can be looked at from outside.
NEAREST = 0.98


@dataclass(frozen=True)
class CompositionSpec:
    """What makes a composed environment: everything that decides its scenarios and rewards. `weights` say how often
    each of `families` is drawn beside the others; without them all are drawn alike. `seed` is the home's: two homes
    draw other scenarios."""

    target: str
    data_hash: str
    capability: str
    families: tuple[str, ...]
    retention_families: tuple[str, ...] = ()
    retention_share: float = 1 / 3
    version: int = 1
    weights: tuple[float, ...] = ()
    seed: int = 0

    @property
    def id(self) -> str:
        """Hash of all fields; of weights and seed where there are any."""
        given = asdict(self).items()
        return content_hash({name: value for name, value in given if name not in ("weights", "seed") or value})


class DenseEnvironment(WrappedEnvironment):
    """An environment of the target with the denser reward. Success stays the target's. `references` are shared by all
    environments of a training, so that a task's reference is replayed once."""

    def __init__(self, inner: Environment, references: References, near_miss: float = NEAR_MISS) -> None:
        super().__init__(inner)
        self._references, self.near_miss = references, near_miss

    def reset(self, task: TargetTask) -> Observation:
        self._calls: list[ToolCall] = []
        self._task = for_one_episode(task)  # the inner one may keep its state in the payload that it is given
        return super().reset(task)

    def step(self, action: Action) -> Observation:
        self._calls.extend(action.tool_calls)
        return super().step(action)

    def score(self) -> Score:
        score = checked_score(self.inner.score())  # `min` takes a bound for nearer than NaN
        if score.success:
            return Score(1.0, True, score.checks, score.metrics)
        return Score(self.near_miss * self._nearness(score), False, score.checks, score.metrics)

    def _nearness(self, score: Score) -> float:
        """In [0, 1): how close the calls came to the reference's, and the share of the told facts, evenly. Where the
        reference makes no call and nothing is to be told, the answer is a text that only the target can judge: the
        target's own reward."""
        reference = self._references.calls(self._task)
        parts = [call_credit(reference, self._calls)] if reference else []
        told = [c.passed for c in score.checks if c.required and c.name.startswith("told:")]
        if told:
            parts.append(sum(told) / len(told))
        return min(NEAREST, sum(parts) / len(parts) if parts else score.reward)


def call_credit(reference: Sequence[ToolCall], made: Sequence[ToolCall]) -> float:
    """Credit in [0, 1] for `made` against `reference`.

    Each reference call takes the best unused call of the same tool: one part for the tool, one per argument; right
    parts count +1, wrong and missing ones -1. A superfluous call costs as much as a right tool earns.
    """
    left = list(made)
    earned, possible = 0.0, 0
    for want in reference:
        size = 1 + len(want.arguments)
        possible += size
        best, value = None, 0.0
        for call in left:
            if call.name != want.name:
                continue
            right = 1 + sum(call.arguments.get(k) == v for k, v in want.arguments.items())
            extra = len(set(call.arguments) - set(want.arguments))
            if best is None or 2 * right - size - extra > value:
                best, value = call, float(2 * right - size - extra)
        if best is not None:
            left.remove(best)
            earned += value
    return max(0.0, min(1.0, (earned - len(left)) / possible)) if possible else 0.0


class ComposedEnvironment:
    """Scenarios by seed, and environments to play them in."""

    def __init__(self, target: Target, spec: CompositionSpec) -> None:
        if not isinstance(target, Generators):
            raise ConfigurationError(
                f"target {target.name!r} has no generators; use the llm synthesizer or add generate() and families()"
            )
        if not spec.families:
            raise ConfigurationError(f"no family of {target.name!r} needs {spec.capability!r}; nothing can be composed")
        self.target, self.generators, self.spec = target, target, spec
        self._references = References(target)

    def retaining(self, families: tuple[str, ...], share: float) -> ComposedEnvironment:
        """The same with these families for retention, in this share of its scenarios: an environment of another id."""
        return ComposedEnvironment(self.target, replace(self.spec, retention_families=families, retention_share=share))

    def weighing(self, weights: tuple[float, ...]) -> ComposedEnvironment:
        """The same with its families drawn by these weights: an environment of another id."""
        return ComposedEnvironment(self.target, replace(self.spec, weights=weights))

    def scenario(self, seed: int) -> TargetTask:
        """The scenario of a seed (any integer)."""
        spec, rng = self.spec, random.Random(f"{self.spec.id}:{seed}")
        if spec.retention_families and rng.random() < spec.retention_share:
            family = rng.choice(spec.retention_families)
        else:
            family = rng.choices(spec.families, spec.weights)[0] if spec.weights else rng.choice(spec.families)
        return self.drawn(family, rng)

    def own_scenario(self, seed: int, family: str = "") -> TargetTask:
        """A scenario that needs the capability, for calibration and for measuring an adapter: of the seed's family, or
        of the one that is named."""
        rng = random.Random(f"{self.spec.id}:own:{seed}")
        drawn = rng.choice(self.spec.families)
        return self.drawn(family or drawn, rng)

    def drawn(self, family: str, rng: random.Random) -> TargetTask:
        """A scenario of a family, of the next random number that the target's generator has one for."""
        return first_made(partial(self.generators.generate, family), (rng.randrange(10**9) for _ in count()))

    def own(self, task: TargetTask) -> bool:
        """Whether a scenario needs the capability; the others are there for retention."""
        return task.family in self.spec.families

    def advice(self, task: TargetTask) -> Sequence[Message]:
        """How another scenario of the same family is solved (`hints.py`): the same one for all of the family's."""
        rng = random.Random(f"{self.spec.id}:advice:{task.family}")
        return solved(self.target.environment(), self.drawn(task.family, rng))

    def environment(self) -> Environment:
        near_miss = NEAR_MISS**self.spec.version
        return DenseEnvironment(self.target.environment(), self._references, near_miss)
