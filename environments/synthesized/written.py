"""Synthesized environments of the kind `llm`: a generated module in the sandbox, played as the target is.

An agent that trains here sees what it will see on the target: the target's policy text, tools and worked examples stand
in front of the module's scenarios, not the module's own. A share of the scenarios are *retention scenarios*, as in
composed environments: fresh ones from the target's generators, or, where it has none, its own diagnosis tasks that the
base solves. They play in the target itself, outside the sandbox.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from environments.contract import (
    Action,
    Environment,
    Generators,
    Message,
    Observation,
    Prompt,
    Score,
    Target,
    TargetTask,
    content_hash,
)
from environments.sandbox.workers import CallKilled, ModuleError, WorkerDied
from environments.synthesized.composed import NEAREST, DenseEnvironment
from environments.synthesized.drawing import AT_ONCE, first_made
from environments.synthesized.hints import solved
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.references import References
from environments.targets.catalogue import with_scripted_user
from errors import CallOverdue, EnvironmentFault, TargetError

T = TypeVar("T")
# Makes an environment of somebody's own, which may hang, or leave the process: with limits on its calls.
Guard = Callable[[Callable[[], Environment]], Environment]
# Seeds of a module stay this small: they are near those that it was validated on, and dates do not overflow. Training
# draws from the first so many, calibration and measuring from as many behind them. Both have every remainder: modules
# take turns by `seed % 2` or the like, and what one of the two never meets is not trained, or not measured.
SEEDS = 500_000
TRIES = 3
# The scenario that is shown solved where an agent is advised: no other use of a module draws it.
SHOWN = 2 * SEEDS


@dataclass(frozen=True)
class WrittenSpec:
    """What makes a written environment. `families` are the target's families that need the capability, and the module's
    own; `retention_tasks` are ids of diagnosis tasks, for targets without generators."""

    target: str
    data_hash: str
    capability: str
    code_hash: str
    families: tuple[str, ...]
    retention_families: tuple[str, ...] = ()
    retention_tasks: tuple[str, ...] = ()
    retention_share: float = 1 / 3

    @property
    def id(self) -> str:
        """Hash of all fields."""
        return content_hash(asdict(self))


def unguarded(make: Callable[[], Environment]) -> Environment:
    """What `make` gives, with no limit on its calls."""
    return make()


def prompt_of(target: Target, names: Sequence[str], guard: Guard = unguarded) -> Prompt:
    """The prompt of the first diagnosis task that opens and offers all tools in `names` (targets may differ by task);
    with the scripted user, as a model would be paid for it.

    Raises `TargetError` where no task does: then nothing learnt with those tools could be used.
    """
    fault: Exception | None = None
    target = with_scripted_user(target)
    for task in target.tasks("diagnosis"):
        try:
            environment = guard(target.environment)
            try:
                environment.reset(task)
                prompt = Prompt.of(environment)
            finally:
                environment.close()
        except Exception as problem:  # a user's task may raise anything; the rollout has said so of its episodes
            if isinstance(problem, AT_ONCE) and not isinstance(problem, CallOverdue):
                raise
            fault = fault or problem
            continue
        if {str(tool["function"]["name"]) for tool in prompt.tools}.issuperset(names):
            return prompt
    problem_of_all = f"no diagnosis task of {target.name!r} offers all of {', '.join(names)}; use tools of one task"
    raise TargetError(problem_of_all) from fault


class WrittenEnvironment:
    """Scenarios by seed, and environments to play them in. `close` ends the module's worker.

    `level` of `levels` says how hard the module's own scenarios are (0: the easiest). It is no part of the identity:
    scenarios of two levels have ids of their own. `guard` makes the environment of the target in which its prompt is
    read.
    """

    def __init__(
        self, target: Target, spec: WrittenSpec, module: SandboxedModule, level: int = 0, guard: Guard = unguarded
    ) -> None:
        if module.code_hash != spec.code_hash:
            raise EnvironmentFault(
                f"the module of {spec.capability!r} has hash {module.code_hash[:12]}, not {spec.code_hash[:12]}"
            )
        self.target, self.spec, self.module, self.level, self.levels = target, spec, module, level, module.levels
        self.prompt = prompt_of(target, list(module.tool_schemas), guard)
        self.references = References(target)
        wanted = set(spec.retention_tasks)
        self._retention = [task for task in target.tasks("diagnosis") if task.id in wanted] if wanted else []

    def at(self, level: int) -> WrittenEnvironment:
        """The same environment at another level; they share the module."""
        other = copy.copy(self)
        other.level = level
        return other

    def retaining(self, families: tuple[str, ...], share: float) -> WrittenEnvironment:
        """The same with these families for retention, in this share of its scenarios: an environment of another id.
        They share the module."""
        other = copy.copy(self)
        other.spec = replace(self.spec, retention_families=families, retention_share=share)
        return other

    def scenario(self, seed: int) -> TargetTask:
        """The scenario of a seed (any integer)."""
        rng = random.Random(f"{self.spec.id}:{seed}")
        if rng.random() < self.spec.retention_share:
            families = self.spec.retention_families
            if families and isinstance(self.target, Generators):
                generate = partial(self.target.generate, rng.choice(families))
                return first_made(generate, (rng.randrange(10**9) for _ in count()))
            if self._retention:
                return rng.choice(self._retention)
        return self._written(rng.randrange(SEEDS) for _ in count())

    def own_scenario(self, seed: int) -> TargetTask:
        """A scenario of the module, for calibration and for measuring an adapter; none that `scenario` gives."""
        rng = random.Random(f"{self.spec.id}:own:{seed}")
        return self._written(SEEDS + rng.randrange(SEEDS) for _ in count())

    def own(self, task: TargetTask) -> bool:
        """Whether a scenario is the module's; the others are the target's, and there for retention. Their payloads may
        have a "code_hash", too."""
        return task.payload.get("code_hash") == self.module.code_hash

    def advice(self, task: TargetTask) -> Sequence[Message]:
        """How the module's own reference solves another scenario of the same level; nothing on retention scenarios."""
        if not self.own(task):
            return ()
        shown = self._written(count(SHOWN))
        try:
            return insisted(lambda: solved(self.module.environment(), shown))
        except ModuleError:  # what is no solution is not shown, here as in `solved`
            return ()

    def environment(self) -> Environment:
        """An environment that plays both kinds of scenario; any number may be in use at once."""
        return TargetLike(self)

    def close(self) -> None:
        """End the module's worker."""
        self.module.close()

    def _written(self, seeds: Iterable[int]) -> TargetTask:
        """The module's scenario of the first of `seeds` that it has one for. Raises `ModuleError` where it has none for
        any of those that are tried: no training can go on with it."""
        try:
            return first_made(self._tried, seeds)
        except AT_ONCE:
            raise
        except EnvironmentFault as fault:
            raise ModuleError(f"the module of {self.spec.capability!r}: {fault}") from fault

    def _tried(self, seed: int) -> TargetTask:
        return insisted(partial(self.module.scenario, seed, self.level))


def insisted(call: Callable[[], T]) -> T:
    """What `call` of a module gives, asked of a fresh worker where the last one was killed: on a busy machine any call
    may pass its deadline. One that has killed `TRIES` of them is the module's doing, whatever the machine: raises
    `ModuleError` then."""
    for _ in range(TRIES - 1):
        try:
            return call()
        except WorkerDied:
            continue
    try:
        return call()
    except CallKilled as killed:
        raise ModuleError(f"one call has killed {TRIES} workers, the last: {killed}") from killed


class TargetLike:
    """Plays a module's scenario behind the target's prompt, or a task of the target in the target."""

    def __init__(self, source: WrittenEnvironment) -> None:
        self._source = source
        self._inner: Environment | None = None
        prompt = source.prompt
        self.instructions: str = prompt.instructions
        self.tools: Sequence[Mapping[str, Any]] = prompt.tools
        self.examples: Sequence[Message] = prompt.examples
        self.max_steps = source.module.max_steps

    def reset(self, task: TargetTask) -> Observation:
        self.close()
        source = self._source
        if source.own(task):
            inner: Environment = source.module.environment()
            observation = inner.reset(task)
            prompt = source.prompt
            self.instructions, self.tools, self.examples = prompt.instructions, prompt.tools, prompt.examples
        else:
            inner = DenseEnvironment(source.target.environment(), source.references)
            observation = inner.reset(task)
            self.instructions, self.tools, self.examples = inner.instructions, inner.tools, inner.examples
        self._inner, self.max_steps = inner, inner.max_steps
        return observation

    def step(self, action: Action) -> Observation:
        inner = self._started()
        observation = inner.step(action)
        if isinstance(inner, DenseEnvironment):  # a task of the target's own, which may offer more now
            self.tools = inner.tools
        return observation

    def score(self) -> Score:
        """What training is paid: 1 for a success, whatever the module's own reward says of it, and less for all else.
        The module shapes what lies below; a success that is worth less than a failure would be unlearnt."""
        score = self._started().score()
        return replace(score, reward=1.0 if score.success else min(NEAREST, score.reward))

    def oracle(self) -> Action | None:
        return self._started().oracle()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _started(self) -> Environment:
        if self._inner is None:
            raise EnvironmentFault("the environment is asked to act before reset, or after close")
        return self._inner
