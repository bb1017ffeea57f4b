"""What acts: the policy contract, and the identity under which its trajectories are stored.

A *token policy* takes token ids and gives token ids with log-probabilities. Both backends (the model in this process,
vLLM servers) are *trainable*: they also take adapters. A *message policy* (an API model without token ids, or oracle,
noop, random) maps a conversation to an action; it can be rolled out and evaluated only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from environments.contract import Action, Environment, Message, content_hash
from errors import ContextOverflow, PolicyError, TraceError


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

    def check(self, context: int, advice: str) -> None:
        """Refuse a turn that a backend of `context` tokens cannot answer: `PolicyError` without a prompt,
        `ContextOverflow` (with `advice`) when prompt and answer do not fit."""
        count, more = len(self.prompt), self.sampling.max_tokens
        if not count:
            raise PolicyError(f"session {self.session!r}: the prompt is empty; give at least one token")
        if count + more > context:
            raise ContextOverflow(
                f"session {self.session!r} needs {count} prompt + {more} new tokens, the context is {context}; {advice}"
            )


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
class Waking(Protocol):
    """A token policy whose turns are computed elsewhere. `wake`, from any thread, has `poll` return at once: with what
    is finished, or with [] although turns are in flight. A call of it while nobody polls is for the next poll."""

    def wake(self) -> None: ...


@runtime_checkable
class Cancelling(Protocol):
    """A token policy that can give up a session's turn: `poll` will not return it."""

    def cancel(self, session: str) -> None: ...


class TrainablePolicy(TokenPolicy, Protocol):
    """A token policy that adapters can be loaded into: what a round needs of the backend that samples.

    `rows` is the number of turns that it computes at once, `adapters` the names that are loaded. `adapter_name` is the
    name to load an adapter under: `origin` (a round's id) and `digest` (its SHA-256) are in it where names must not be
    used twice. `load_adapter` takes a PEFT folder that was checked (`models/adapters/loading.py`). `generate` finishes
    all requests, `score` gives log-probabilities (nats, temperature 1) of the last `count` of `ids`. `close` ends what
    is in flight and gives back what the policy holds elsewhere: memory, connections, adapters on servers.
    """

    rows: int

    @property
    def adapters(self) -> tuple[str, ...]: ...
    def adapter_name(self, capability: str, origin: str, digest: str) -> str: ...
    def load_adapter(self, name: str, digest: str, folder: Path) -> None: ...
    def unload_adapter(self, name: str) -> None: ...
    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...
    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]: ...
    def close(self) -> None: ...


@runtime_checkable
class MessagePolicy(Protocol):
    """Maps the conversation so far to an action: an API model, or a script (oracle, noop, random).

    One protocol for both, because the player asks the same of them. The prompt is the environment's instructions, tools
    and examples; only an oracle may ask more of it.
    """

    def identity(self, adapter: str | None = None) -> PolicyIdentity: ...
    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action: ...
