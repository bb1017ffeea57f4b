"""Policies without a model, for measuring environments: oracle, noop, random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from environments.contract import Action, Environment, Message, ToolCall
from models.policy import PolicyIdentity

REFUSAL = "I am sorry, I cannot do that."


class OraclePolicy:
    """The environment's own reference solution; a last word when it has none left."""

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("oracle", "1")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        return environment.oracle() or Action(content="Is there anything else?")


class NoopPolicy:
    """Says that it cannot, whatever is asked."""

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("noop", "1")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        return Action(content=REFUSAL)


class RandomPolicy:
    """A random tool with arguments of the right type, words taken from the conversation; or a sentence."""

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("random", "1")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        rng = random.Random(seed)
        if not environment.tools or rng.random() < 0.3:
            return Action(content=rng.choice([REFUSAL, "Done.", "Yes.", "What is your order number?"]))
        function = rng.choice(list(environment.tools))["function"]
        words = " ".join(m.content for m in messages).replace("?", " ").replace(".", " ").split() or ["x"]
        numbers = [int(w) for w in words if w.isdigit()] or [rng.randint(1, 999)]
        kinds = function.get("parameters", {}).get("properties", {})
        arguments = {
            k: rng.choice(numbers) if v.get("type") in ("integer", "number") else rng.choice(words)
            for k, v in kinds.items()
        }
        return Action(tool_calls=(ToolCall(function["name"], arguments, "call_0"),))
