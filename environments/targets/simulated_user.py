"""Simulated users: one who tells the scenario's facts, and one played by a model through LiteLLM.

The only place where the environments call a provider.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from environments.contract import ToolCall
from errors import ProviderError

# OpenAI-form messages and tools -> text and tool calls of one turn.
Completion = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], tuple[str, tuple[ToolCall, ...]]]
# Model name and messages of a call -> a context in which it is made; what that gives is called with the response.
Meter = Callable[[str, Sequence[Mapping[str, Any]]], AbstractContextManager[Callable[[Any], None]]]
_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)

YES = "Yes, please go ahead."
# A scripted user agrees at most this often to an agent that only asks; then it leaves.
PATIENCE = 8

_FIRST_PERSON = {
    "you are": "I am",
    "you're": "I'm",
    "you were": "I was",
    "you've": "I've",
    "you'd": "I'd",
    "you'll": "I'll",
    "yourself": "myself",
    "yours": "mine",
    "your": "my",
    "you": "I",
}
_PATTERN = re.compile(r"\b(" + "|".join(_FIRST_PERSON) + r")\b", re.IGNORECASE)


def in_first_person(text: str) -> str:
    """Scenario prose ("You are Emma Kim ...") as the user would say it. The facts stay as they are."""
    return _PATTERN.sub(lambda match: _FIRST_PERSON[match.group(0).lower()], text).strip()


class FactTeller:
    """What a scripted user says: the facts it still has, one a turn; then yes to questions, at most 8 times; then None,
    which means that it leaves."""

    def __init__(self, facts: Sequence[str]) -> None:
        self._facts, self._agreed = list(facts), 0

    def reply(self, heard: str) -> str | None:
        """The answer to `heard`."""
        if self._facts:
            return self._facts.pop(0)
        if "?" in heard and self._agreed < PATIENCE:
            self._agreed += 1
            return YES
        return None


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Let `meter` count, and hold to its cap, what simulated users cost in this thread while the body runs."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def _unmetered(model: str, messages: Sequence[Mapping[str, Any]]) -> AbstractContextManager[Callable[[Any], None]]:
    return nullcontext(lambda response: None)


def litellm_completion(model: str, temperature: float = 0.0, timeout: float = 120.0) -> Completion:
    """One turn of `model` (a LiteLLM name; keys and addresses come from LiteLLM's own variables).

    A failed call raises ProviderError, `transient` when a retry may help; an empty turn raises it too, so that a user
    who says nothing never becomes a reward of 0. Calls are counted by the thread's meter (`metered`), if it has one.
    """

    def complete(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        # Without this LiteLLM fetches a price list at import: seven seconds, and a failure without a network.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm
        import openai

        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            with (_meter.get() or _unmetered)(model, messages) as charge:
                reply = litellm.completion(
                    model=model,
                    messages=list(messages),
                    temperature=temperature,
                    timeout=timeout,
                    num_retries=0,
                    max_retries=0,
                    **options,
                )
                charge(reply)
        except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError) as error:
            raise ProviderError(f"simulated user {model!r}: {error}; try again later", transient=True) from error
        except (openai.OpenAIError, ValueError) as error:
            raise ProviderError(
                f"simulated user {model!r}: {error}; check the model's name, key and address"
            ) from error
        message = reply.choices[0].message
        calls = tuple(_call(model, item.id or "", item.function) for item in message.tool_calls or ())
        text = (message.content or "").strip()
        if not text and not calls:
            raise ProviderError(f"simulated user {model!r} gave an empty turn; try again", transient=True)
        return text, calls

    return complete


def _call(model: str, call_id: str, function: Any) -> ToolCall:
    """The tool call of a reply. Raises ProviderError when its arguments are not a JSON object."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        raise ProviderError(
            f"simulated user {model!r} gave arguments that are not JSON: {error}", transient=True
        ) from error
    if not isinstance(arguments, dict):
        raise ProviderError(f"simulated user {model!r} gave arguments {arguments!r}, not an object", transient=True)
    return ToolCall(function.name, arguments, call_id)
