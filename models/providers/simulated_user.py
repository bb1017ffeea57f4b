"""A language model as a simulated user: what targets with a user played by a model are given when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import ToolCall
from environments.targets.third_party.adapter import model_of_user
from environments.targets.third_party.simulated_user import UserModel
from errors import ProviderError, TraceError
from models.providers.client import ModelClient
from models.providers.litellm_client import CalledTool, CallFailed, ModelCall

PURPOSE = "simulated_user"


def user_model(user: str, client: ModelClient, price: tuple[float, float] | None = None) -> UserModel | None:
    """Who plays a user called `litellm:MODEL`; None for the others, who need no model.

    Keys and addresses come from LiteLLM's own variables. `price` is dollars per million (prompt, sampled) tokens where
    LiteLLM's table lacks the model. A turn raises `BudgetExceeded` before a call that may pass the client's cap, and
    `ProviderError` for a failed call (`transient` when a retry may help) and for an empty turn, so that a user who says
    nothing never becomes a reward of 0.
    """
    model = model_of_user(user)
    if not model:
        return None

    def turn(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            reply = client.complete(ModelCall(PURPOSE, model, messages, tools, temperature=0.0, price=price))
        except CallFailed as error:
            advice = "try again later" if error.transient else "check the model's name, key and address"
            raise ProviderError(
                f"simulated user {model!r}: {error.text}; {advice}", transient=error.transient
            ) from error
        except ValueError as error:
            if isinstance(error, TraceError):
                raise
            raise ProviderError(
                f"simulated user {model!r}: {error}; check the model's name, key and address"
            ) from error
        calls, text = tuple(_tool_call(model, call) for call in reply.calls), reply.content.strip()
        if not text and not calls:
            raise ProviderError(f"simulated user {model!r} gave an empty turn; try again", transient=True)
        return text, calls

    return turn


def _tool_call(model: str, call: CalledTool) -> ToolCall:
    """The tool call of a reply. Raises ProviderError when its arguments are not a JSON object."""
    try:
        arguments = json.loads(call.arguments)
    except json.JSONDecodeError as error:
        raise ProviderError(
            f"simulated user {model!r} gave arguments that are not JSON: {error}", transient=True
        ) from error
    if not isinstance(arguments, dict):
        raise ProviderError(f"simulated user {model!r} gave arguments {arguments!r}, not an object", transient=True)
    return ToolCall(call.name, arguments, call.id)
