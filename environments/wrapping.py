"""An environment around another one: what every wrapper hands through, so that each says only what it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from environments.contract import Action, Environment, Message, Observation, Score, TargetTask


class WrappedEnvironment:
    """Everything is the inner environment's. `take_over` copies what it offers; some decide that at `reset`, and which
    tools there are with every step."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        with suppress(AttributeError):  # some have what they offer only once they are reset
            self.take_over()

    def take_over(self) -> None:
        """What the inner environment offers now."""
        self.tools: Sequence[Mapping[str, Any]] = self.inner.tools
        self.instructions: str = self.inner.instructions
        self.examples: Sequence[Message] = self.inner.examples
        self.max_steps: int = self.inner.max_steps

    def reset(self, task: TargetTask) -> Observation:
        observation = self.inner.reset(task)
        self.take_over()
        return observation

    def step(self, action: Action) -> Observation:
        observation = self.inner.step(action)
        self.tools = self.inner.tools  # some environments offer more in later turns; the rest is read at `reset` alone
        return observation

    def score(self) -> Score:
        return self.inner.score()

    def oracle(self) -> Action | None:
        return self.inner.oracle()

    def close(self) -> None:
        self.inner.close()
