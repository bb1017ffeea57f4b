"""A language model as a simulated user: what targets with a user played by a model are given when they are loaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import ToolCall
from environments.targets.third_party.adapter import model_of_user
from environments.targets.third_party.simulated_user import UserModel
from errors import BudgetExceeded, ProviderError, TraceError
from models.deadline import held
from models.providers.client import ModelClient
from models.providers.litellm_client import CalledTool, CallFailed, ModelCall
from models.providers.tries import WAITS, tried

PURPOSE = "simulated_user"
# The longest wait for one reply, and how long a turn's calls that failed are tried again.
CALL_SECONDS, TRY_SECONDS = 60.0, 120.0
# Turns that are asked for at once, where nothing else is given.
CONCURRENCY = 4


def user_model(
    user: str,
    client: ModelClient,
    price: tuple[float, float] | None = None,
    concurrency: int = CONCURRENCY,
    send_temperature: bool = True,
) -> UserModel | None:
    """Who plays a user called `litellm:MODEL`; None for the others, who need no model.

    Keys and addresses come from LiteLLM's own variables. `price` is dollars per million (prompt, sampled) tokens where
    LiteLLM's table lacks the model. At most `concurrency` turns are asked for at once. `send_temperature` is off for a
    model that takes none; the others get 0.

    A call whose failure may pass is tried again, until the client is closed. A turn raises `BudgetExceeded` before a
    call that may pass the client's cap and where the provider wants to be paid (HTTP 402), which no other episode
    changes. It raises `ProviderError` for a call that still failed (`transient` when trying later may help) and for an
    empty turn, so that a user who says nothing never becomes a reward of 0. The limit of the environment's call around
    a turn stands still meanwhile: how long a provider takes is no fault of the environment.
    """
    model = model_of_user(user)
    if not model:
        return None
    slots, temperature = threading.BoundedSemaphore(concurrency), 0.0 if send_temperature else None

    def turn(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        call = ModelCall(PURPOSE, model, messages, tools, temperature=temperature, seconds=CALL_SECONDS, price=price)
        try:
            with held(), slots:
                return tried(lambda: once(call), f"simulated user {model!r}", client.closed, WAITS, TRY_SECONDS)
        except CallFailed as error:
            if error.unpaid:
                raise BudgetExceeded(
                    f"simulated user {model!r}: {error.text}; pay its provider (HTTP 402), then run the same command "
                    "again: what was played is kept"
                ) from error
            advice = "try again later" if error.transient else "check the model's name, key and address"
            raise ProviderError(
                f"simulated user {model!r}: {error.text}; {advice}", transient=error.transient
            ) from error

    def once(call: ModelCall) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            reply = client.complete(call)
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
