"""Policies without a model, for measuring environments and methods: oracle, noop, replay, random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from environments.contract import Action, Environment, Message, ToolCall, content_hash
from models.policy import PolicyIdentity

REFUSAL = "I am sorry, I cannot do that."
LAST_WORD = Action(content="Is there anything else?")


class OraclePolicy:
    """The environment's own reference solution; a last word when it has none left."""

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("oracle", "1")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        return environment.oracle() or LAST_WORD


class NoopPolicy:
    """Says that it cannot, whatever is asked."""

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("noop", "1")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        return Action(content=REFUSAL)


@dataclass(frozen=True)
class ReplayPolicy:
    """The same actions whatever is asked, one a turn, and a last word after them."""

    actions: tuple[Action, ...]

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        said = [(a.content, a.malformed, [(c.name, c.arguments) for c in a.tool_calls]) for a in self.actions]
        return PolicyIdentity("replay", content_hash(said))

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        turn = sum(message.role == "assistant" for message in messages)
        return self.actions[turn] if turn < len(self.actions) else LAST_WORD


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
        numbers = [int(w) for w in words if w.isdecimal()] or [rng.randint(1, 999)]
        kinds = function.get("parameters", {}).get("properties", {})
        arguments = {
            k: rng.choice(numbers) if v.get("type") in ("integer", "number") else rng.choice(words)
            for k, v in kinds.items()
        }
        return Action(tool_calls=(ToolCall(function["name"], arguments, "call_0"),))
