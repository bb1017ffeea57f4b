"""What the gateway needs of anything that answers, and what a turn through it gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from environments.contract import Prompt
from errors import ProviderError
from models.policy import Generation, Request
from models.serving.fleet.lifecycle import ServedAdapter
from models.serving.openai_api.requests import ChatRequest, Usage

# The limit of the request that is being answered. A wait that is cancelled learns from it whether time was up, or the
# client has left.
DEADLINE: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)


@dataclass
class TurnResult:
    """The result of a turn, for the code that stores or counts it. `message` is the assistant's, in OpenAI's form."""

    message: dict[str, Any] = field(default_factory=dict)
    finish: str = ""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Turn:
    """One turn to answer. `adapter` None is the base; `name` is what the answer is signed with; `prompt` stands before
    the messages, or None. `listen` asks for `heard.message` to be filled in."""

    asked: ChatRequest
    adapter: ServedAdapter | None
    name: str
    conversation: str
    prompt: Prompt | None = None
    listen: bool = False
    heard: TurnResult = field(default_factory=TurnResult)


@dataclass(frozen=True)
class Replica:
    """One server behind the gateway, as it was last seen."""

    address: str
    alive: bool
    problem: str = ""


class AdapterGone(ProviderError):
    """A server that should hold the adapter answered that it does not know it."""

    def __init__(self, replica: str) -> None:
        super().__init__(f"{replica} does not know the adapter; it is loaded again within seconds")
        self.replica = replica


class HoldersAway(AdapterGone):
    """Nobody answers where the adapter is loaded, while there are servers without it."""

    def __init__(self) -> None:
        ProviderError.__init__(self, "no server that has the adapter answers; ask again later")
        self.replica = ""


class Upstream(Protocol):
    """Both calls raise `ApiError`, and `AdapterGone` before anything was sent. `stream` gives server-sent events;
    nothing was sent before its first one, and closing it ends the work behind it. `longest` is the longest answer to a
    request that names no limit, in tokens (0: not known), and `ahead` about what a prompt takes ahead of a request."""

    @property
    def longest(self) -> int: ...
    def ahead(self, prompt: Prompt) -> int: ...
    async def answer(self, turn: Turn) -> dict[str, Any]: ...
    def stream(self, turn: Turn) -> AsyncGenerator[bytes]: ...
    async def replicas(self) -> list[Replica]: ...
    async def close(self) -> None: ...


class TokenEngine(Protocol):
    """Samples token ids: the model in this process (`LocalEngine`), or servers (`HttpTokens`). `context` in tokens;
    `holders` are the replicas that have the adapter."""

    @property
    def context(self) -> int: ...
    def generate(
        self, request: Request, streamed: bool = False, holders: Sequence[str] = ()
    ) -> AsyncGenerator[list[int] | Generation]: ...
    async def replicas(self) -> list[Replica]: ...
    async def close(self) -> None: ...
