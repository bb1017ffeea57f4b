"""What an environment, a target and a target task are: the only file that every other part may rely on.

An environment is a conversation with tools that a program scores. It holds no global state, is cheap to
build, and is deterministic given (task, actions). The user is part of it: scripted, or played by a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from errors import TargetError

Role = Literal["system", "user", "assistant", "tool"]
SPLITS = ("diagnosis", "validation", "test")
# What a round draws anew, of a target that can (`Drawable`).
DRAWN_SPLITS = ("diagnosis", "validation")
# The deepest nesting of a call's arguments. What is deeper cannot be copied, hashed and stored everywhere, because
# Python's stack ends; no tool asks for nearly as much.
DEEPEST = 64


def canonical_json(value: Any) -> str:
    """The one textual form of a JSON value: sorted keys, no spaces, plain UTF-8. Raises on NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any, length: int = 16) -> str:
    """First `length` hex digits of the SHA-256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the agent. `arguments` is the parsed JSON object."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One message of the conversation, in the OpenAI sense."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A JSON-able form without empty fields."""
        # Written out: every message of every episode comes by here, and `asdict` takes six times as long.
        calls = tuple({"name": c.name, "arguments": deepcopy(c.arguments), "id": c.id} for c in self.tool_calls)
        rest = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return {"role": self.role, "content": self.content} | {key: value for key, value in rest.items() if value}


@dataclass(frozen=True)
class Action:
    """What the agent does in one step: tool calls, or a message to the user (never neither).

    `malformed` holds the text of a turn that looked like a call but could not be parsed: environments answer it
    with an error observation, as they do for an unknown tool.
    """

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""

    def as_message(self) -> Message:
        """The assistant message that this action adds to the conversation."""
        return Message("assistant", self.content or self.malformed, self.tool_calls)


def too_deep(calls: Sequence[ToolCall]) -> bool:
    """Whether the arguments of a call are nested deeper than `DEEPEST`. It needs no stack of its own."""
    left: list[tuple[Any, int]] = [(call.arguments, 0) for call in calls]
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            return True
        if isinstance(value, Mapping):
            left += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list | tuple):
            left += [(part, depth + 1) for part in value]
    return False


@dataclass(frozen=True)
class Observation:
    """Messages to append to the conversation (tool results, user turns), and whether the episode is over, which it is
    not at `reset`."""

    messages: tuple[Message, ...]
    done: bool = False


@dataclass(frozen=True)
class Check:
    """One verdict of the verifier.

    `kind` is the capability that the check speaks about (snake_case, 2-5 words); `name` is the check within the
    task; `required` says whether the task needs it at all (a forbidden write that never came up is not required).
    """

    name: str
    kind: str
    required: bool
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Score:
    """Reward in [0, 1], success, and the checks behind them. `metrics` holds further figures of the target."""

    reward: float
    success: bool
    checks: tuple[Check, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetTask:
    """One task of a target. `id` is its own among all tasks of the target, whatever their split: what was played is
    stored under it, so that of two tasks with one id the second would get the first one's score (`task_ids` refuses
    them). `payload` is JSON and enough to rebuild the episode, which gets a copy of it; `capabilities` are the tags of
    its family: ground truth for measuring the router and the analyst, which never see them."""

    id: str
    split: str
    family: str
    seed: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()


class Termination(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    MAX_STEPS = "max_steps"
    CONTEXT = "context"
    ERROR = "error"


@dataclass(frozen=True)
class Prompt:
    """What stands in front of a conversation: the policy text, the tools on offer (OpenAI function schemas), and worked
    turns between the two and the conversation's first message."""

    instructions: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[Message] = ()

    @classmethod
    def of(cls, environment: Environment) -> Prompt:
        """The prompt that an environment shows now; valid after `reset`, because some decide it by task."""
        return cls(environment.instructions, tuple(environment.tools), tuple(environment.examples))


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; build another for another. `tools`, `instructions` and `examples` are valid after `reset`.

    `tools` are OpenAI function schemas; `instructions` is the policy text for the system message; `examples` are worked
    turns that stand between the system message and the conversation. `step` and `score` never raise because of what
    the agent did: a bad call is answered by an error observation. What they raise is a fault of the environment.
    """

    tools: Sequence[Mapping[str, Any]]
    instructions: str
    examples: Sequence[Message]
    max_steps: int

    def reset(self, task: TargetTask) -> Observation: ...
    def step(self, action: Action) -> Observation: ...
    def score(self) -> Score: ...
    def oracle(self) -> Action | None:
        """The reference solution's next action in the present state; None when there is none (any more)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Target(Protocol):
    """An environment to improve on, with its tasks. `data_hash`, a text, covers everything that decides a score."""

    name: str
    licence: str

    @property
    def data_hash(self) -> str: ...
    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The fixed tasks of a split, a list of the same ones every time. Each says this split as its own; no id is
        another task's, in this split, in another, or among the tasks of `generate` and `drawn`."""
        ...

    def environment(self) -> Environment: ...


@runtime_checkable
class Generators(Protocol):
    """Optional on a target: fresh scenarios by family, on seeds disjoint from every split."""

    def families(self) -> Mapping[str, tuple[str, ...]]:
        """Family -> the capabilities that it needs."""
        ...

    def generate(self, family: str, seed: int) -> TargetTask:
        """A scenario of the family; equal seeds give equal scenarios, and none of them is in a split."""
        ...


@dataclass(frozen=True)
class Draw:
    """Which tasks a round draws: the `seed` of its home, its `number`, and the contents (`Drawable.content`) that
    earlier rounds drew. Both splits of a round are drawn with the same `used`."""

    seed: int
    number: int
    used: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.number < 0:
            raise TargetError(f"draw {self.number} is negative; rounds are numbered from 1")


@runtime_checkable
class ShiftTested(Protocol):
    """Optional on a target: a shift test, tasks that its environment plays and that differ from those of all splits in
    kind (other words, other things, harder ones). It is only ever reported: nothing is trained or chosen on it."""

    def shift_test(self) -> Sequence[TargetTask]:
        """The tasks, of all kinds from the first on, so that the first of them are a fair part. Their split is "test":
        no budget pays for their episodes."""
        ...


@runtime_checkable
class DrawsTests(Protocol):
    """Optional on a target that draws: test tasks and a shift test of a draw's own, on which methods are compared. The
    fixed ones are seen while settings are chosen, by whoever chooses them; these nobody has seen before."""

    def drawn_test(self, draw: Draw) -> Sequence[TargetTask]:
        """Tasks of the split "test"; none has a content or an opening that another task of the same draw, of a fixed
        split or of `generate` has."""
        ...

    def drawn_shift(self, draw: Draw) -> Sequence[TargetTask]:
        """A shift test (`ShiftTested`) of the draw's own, of all kinds from the first on."""
        ...


@runtime_checkable
class HoldsBack(Protocol):
    """Optional on a target whose tasks are fixed: test and shift tasks on which methods are compared, because nobody
    looked at them while settings were chosen. They are the same for every seed."""

    def held_back_test(self) -> Sequence[TargetTask]:
        """Tasks of the split "test", of all families from the first on."""
        ...

    def held_back_shift(self) -> Sequence[TargetTask]:
        """Tasks of the shift test (`ShiftTested`), of all kinds from the first on."""
        ...


@runtime_checkable
class Drawable(Protocol):
    """Optional on a target: new diagnosis and validation tasks for every round. A target with a finite set of tasks has
    no draws; its rounds play the same tasks with other seeds."""

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        """The round's tasks of `split`, "diagnosis" or "validation"; equal draws give equal tasks.

        None has the content of another of either split, of a task of the fixed splits, of a task that `generate` can
        give, or one in `draw.used`, nor the id of another round's. Raises TargetError on another split, and when not
        enough unused contents are left.
        """
        ...

    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        """`count` more validation tasks of a family for the same round, beside those of `drawn`, under the same rules;
        fewer are the first of more. Raises TargetError as `drawn` does."""
        ...

    def content(self, task: TargetTask) -> str:
        """Hash of what the task asks and what solves it: equal for tasks that differ in their seed alone."""
        ...
