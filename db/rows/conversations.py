"""Rows of `conversations` and `replies`: what users said to the gateway, and what a model answered to the analyst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.types import utc_now

# The `release` of a conversation that several answered, or one by several routers: what is said of it is said of none.
SEVERAL = -1
# The target of a round on what users said: conversations with feedback are its episodes, and it makes no release.
TRAFFIC = "traffic"


@dataclass(frozen=True, kw_only=True)
class ConversationRow:
    """A row of `conversations`: a conversation of the gateway as it stood after its last answer, and the feedback on
    it. `conversation` is the name that the client knows it by, `release` the number of the one that answered (0: the
    bare base; None: kept before this was)."""

    TABLE: ClassVar[str] = "conversations"

    id: str
    conversation: str
    target: str
    base: str
    policy_id: str
    capability: str
    adapter: str
    mode: str
    release: int | None = None
    router_version: str
    probabilities: Mapping[str, float] = field(default_factory=dict)
    routing_milliseconds: float = 0.0
    messages: Sequence[Mapping[str, Any]] = field(default_factory=list)
    tools: Sequence[str] = field(default_factory=list)
    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    reward: float | None = None
    success: bool | None = None
    comment: str = ""
    feedback_at: datetime | None = None
    created_at: datetime = field(default_factory=utc_now)
    updated_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class ReplyRow:
    """A row of `replies`: a model's reply to an analyst's request, kept so that it is never paid for twice."""

    TABLE: ClassVar[str] = "replies"

    request_hash: str
    model: str
    reply: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float = 0.0
    created_at: datetime = field(default_factory=utc_now)
