"""Prompts that a method made: other instructions, and worked examples behind those of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from environments.contract import (
    Environment,
    Message,
    Prompt,
    ToolCall,
    content_hash,
)
from environments.wrapping import WrappedEnvironment
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.target_prompt import first_opening


@dataclass(frozen=True)
class Prompting:
    """What a method changes in the prompt: `wording` replaces a text of the target's instructions by another where it
    stands (an empty text: instructions where there are none), `examples` are worked conversations that follow the
    target's own."""

    wording: tuple[str, str] = ("", "")
    examples: tuple[tuple[Message, ...], ...] = ()

    @property
    def id(self) -> str:
        """Hash of everything that it changes."""
        return content_hash([self.wording, [[m.as_dict() for m in example] for example in self.examples]])

    def of(self, prompt: Prompt) -> tuple[str, tuple[Message, ...]]:
        """The target's instructions and examples as they are shown instead."""
        (old, new), instructions, examples = self.wording, prompt.instructions, prompt.examples
        worked = (_in_order(message, prompt.tools) for example in self.examples for message in example)
        return instructions.replace(old, new) if old else instructions or new, (*examples, *worked)

    @property
    def is_none(self) -> bool:
        """Whether the prompt stays as the target has it."""
        return self.wording[0] == self.wording[1] and not self.examples


class PromptedEnvironment(WrappedEnvironment):
    """An environment of the target behind another prompt. Everything else stays the target's."""

    def __init__(self, inner: Environment, prompting: Prompting) -> None:
        self.prompting = prompting
        super().__init__(inner)

    def take_over(self) -> None:
        super().take_over()
        self.instructions, self.examples = self.prompting.of(Prompt.of(self.inner))


def prompted(context: Context, prompting: Prompting, purpose: str) -> Playground:
    """The target's own environment behind another prompt, at the evaluation temperature; ids of its episodes are those
    of no other prompt."""
    ground = context.ground(purpose)
    if prompting.is_none:
        return ground
    make = context.target.environment
    return replace(
        ground, make=lambda: PromptedEnvironment(make(), prompting), scope=f"{ground.where}|prompt:{prompting.id}"
    )


def worked_example(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """A stored conversation as worked turns: from the user's first message to the agent's last; () where it does not
    begin with a user or has no turn of the agent."""
    turns = [_message(m) for m in messages]
    while turns and turns[-1].role != "assistant":
        turns.pop()
    return tuple(turns) if turns and turns[0].role == "user" else ()


def _message(stored: Mapping[str, Any]) -> Message:
    calls = tuple(
        ToolCall(c["name"], dict(c.get("arguments") or {}), c.get("id", "")) for c in stored.get("tool_calls", ())
    )
    return Message(stored["role"], stored["content"], calls, stored.get("tool_call_id", ""), stored.get("name", ""))


def _in_order(message: Message, tools: Sequence[Mapping[str, Any]]) -> Message:
    """The message with the arguments of its calls in the order of the tools' parameters, others behind them: a stored
    call may come with its keys in the database's order, and the compact form writes values by their place."""
    if not message.tool_calls:
        return message
    functions = [tool["function"] for tool in tools]
    known = {
        f["name"]: {n: i for i, n in enumerate((f.get("parameters") or {}).get("properties", {}))} for f in functions
    }

    def ordered(call: ToolCall) -> ToolCall:
        place = known.get(call.name, {})
        arguments = sorted(call.arguments.items(), key=lambda item: place.get(item[0], len(place)))
        return replace(call, arguments=dict(arguments))

    return replace(message, tool_calls=tuple(map(ordered, message.tool_calls)))


def opening_tokens(context: Context, prompting: Prompting) -> int:
    """How many tokens stand before the agent's first turn of the target's first task. Raises `ConfigurationError` for
    examples whose turns cannot follow one another."""
    prompt, first = first_opening(context.target)
    instructions, shown_examples = prompting.of(prompt)
    shown = Prompt(instructions, prompt.tools, shown_examples)
    return len(context.base.renderer.start(shown, first).ids)
