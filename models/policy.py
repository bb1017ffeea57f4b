"""What acts: the policy contract, and the identity under which its trajectories are stored.

A *token policy* (local or vLLM) takes token ids and gives token ids with log-probabilities; it can be trained.
A *scripted policy* (oracle, noop, random, or an API model without token ids) maps a conversation to an action; it
can be rolled out and evaluated only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from environments.contract import Action, Environment, Message, content_hash
from errors import TraceError


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. `temperature` 0 is greedy; log-probabilities are always those of the distribution
    sampled from (the plain softmax when greedy). `seed` makes a row's draws independent of the batch it is in."""

    temperature: float = 1.0
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One turn to sample. `prompt` is the whole conversation as token ids; equal `session`s extend one another, so a
    backend may keep the key-value cache of what it has seen. `adapter` None is the base model. `shared` says how many
    leading ids (instructions and examples) other requests have too, so that they are computed once."""

    session: str
    prompt: Sequence[int]
    sampling: Sampling
    adapter: str | None = None
    shared: int = 0


@dataclass(frozen=True)
class Generation:
    """The answer to a request: exactly the sampled ids, their log-probabilities (nats), and why it ended
    ("stop" at an end-of-turn id, "length" at `max_tokens`, "error" with no ids and a `problem` when this turn could
    not be answered while others can)."""

    session: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    problem: TraceError | None = None


@dataclass(frozen=True)
class PolicyIdentity:
    """What makes two policies the same one."""

    base: str
    revision: str
    dtype: str = ""
    adapter: str = ""
    renderer: str = ""

    @property
    def id(self) -> str:
        """Hash of all fields; part of every trajectory's id."""
        return content_hash([self.base, self.revision, self.dtype, self.adapter, self.renderer])


@runtime_checkable
class TokenPolicy(Protocol):
    """Many turns in flight at once: `submit` queues, `poll` computes until at least one is finished.

    `context` is the longest prompt plus answer, in tokens. `stop_ids` end a turn. `poll` returns [] only when nothing
    is in flight. `release` forgets a session's cache.
    """

    context: int
    stop_ids: frozenset[int]

    def identity(self, adapter: str | None = None) -> PolicyIdentity: ...
    def submit(self, request: Request) -> None: ...
    def poll(self) -> list[Generation]: ...
    def release(self, session: str) -> None: ...


@runtime_checkable
class ScriptedPolicy(Protocol):
    """Maps the conversation so far to an action. `environment` is given for oracles; others must not touch it."""

    def identity(self, adapter: str | None = None) -> PolicyIdentity: ...
    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action: ...
