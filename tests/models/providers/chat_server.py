"""A scripted server that speaks the chat protocol with tools. It stands in for a provider, which cannot run in tests:
real HTTP, real LiteLLM on the other side."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.models.providers.scripted_analyst import ScriptedAnalyst, failed, good

Step = dict[str, Any]


def calls(*given: tuple[str, Any], prompt_tokens: int = 100, sampled_tokens: int = 10) -> Step:
    """A reply of tool calls (name, arguments); arguments that are a text are sent as they are."""
    step = good("", prompt_tokens, sampled_tokens)
    choice = step["body"]["choices"][0]
    choice["finish_reason"] = "tool_calls"
    choice["message"] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"c{index}",
                "type": "function",
                "function": {"name": name, "arguments": what if isinstance(what, str) else json.dumps(what)},
            }
            for index, (name, what) in enumerate(given)
        ],
    }
    return step


def says(text: str) -> Step:
    """A reply in words."""
    return good(text, 100, 10)


def asked_to_ping(request: Step) -> bool:
    """Whether this is the question that every evaluation begins with."""
    return [t["function"]["name"] for t in request.get("tools", [])] == ["ping"]


def agent(act: Callable[[int, Step], Step]) -> ScriptedAnalyst:
    """A server whose model knows tool calling; `act(number, request)` decides what it does in episodes, counted from
    0."""
    seen = [0]

    def script(number: int, request: Step) -> Step:
        if asked_to_ping(request):
            return calls(("ping", {"word": "pong"}))
        seen[0] += 1
        return act(seen[0] - 1, request)

    return ScriptedAnalyst(script)


__all__ = ["agent", "asked_to_ping", "calls", "failed", "says"]
