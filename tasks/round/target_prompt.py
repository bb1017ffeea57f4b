"""A target's own prompt: as it stands in front of a request to a language model, and as its first task opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from environments.contract import SPLITS, Message, Prompt, Target, TargetTask
from environments.targets.catalogue import with_scripted_user
from errors import EnvironmentFault
from models.opening import opened
from tasks.round.traffic import TrafficTarget

# What a target without any task is asked, where something has to be asked.
NEUTRAL = "Please help me with my request."


def target_prompt(target: Target) -> Prompt:
    """The prompt of a target as its diagnosis tasks show it: instructions and examples of the first task that has some,
    and the union of all tasks' tools, for those that differ by task. A task that does not open shows nothing; raises
    what the first one raised where none does. Conversations of users cannot be opened: theirs is what is stored."""
    if isinstance(target, TrafficTarget):
        return target.prompt
    target = with_scripted_user(target)
    shown = Prompt()
    tools: dict[str, Mapping[str, Any]] = {}
    for now, _ in _opened(target, target.tasks("diagnosis")):
        shown = Prompt(shown.instructions or now.instructions, (), shown.examples or now.examples)
        for tool in now.tools:
            tools.setdefault(str(tool["function"]["name"]), tool)
    return Prompt(shown.instructions, tuple(tools.values()), shown.examples)


def first_opening(target: Target) -> tuple[Prompt, tuple[Message, ...]]:
    """The prompt of a target's first task that opens, and the messages that the task opens with.

    The task is of diagnosis, or of the next split that has any. A target without a task gives an empty prompt and a
    neutral sentence; raises what the first task raised where none opens. Conversations of users (`TrafficTarget`)
    cannot be reset: they raise `TargetError`.
    """
    target = with_scripted_user(target)
    tasks = (task for split in SPLITS for task in target.tasks(split))
    return next(_opened(target, tasks), (Prompt(), (Message("user", NEUTRAL),)))


def prompt_of_task(target: Target, task: TargetTask) -> Prompt:
    """The prompt that a task stands behind, which may be its own. Raises what the task raises where it does not
    open."""
    return next(_opened(with_scripted_user(target), [task]))[0]


def _opened(target: Target, tasks: Iterable[TargetTask]) -> Iterator[tuple[Prompt, tuple[Message, ...]]]:
    """Prompt and first messages of the tasks that open. Raises what the first one raised where none of them does."""
    some = False
    fault: EnvironmentFault | None = None
    for task in tasks:
        try:
            found = opened(target.environment, task)
        except EnvironmentFault as problem:  # the episode itself will tell
            fault = fault or problem
            continue
        some = True
        yield found
    if fault is not None and not some:
        raise fault


def context_text(target: Target) -> str:
    """Policy and tools as they stand once in front of every request."""
    prompt = target_prompt(target)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in prompt.tools)
    return f"## Policy\n{prompt.instructions}\n\n## Tools\n{lines}"
