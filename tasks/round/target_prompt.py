"""A target's own prompt: as it stands in front of a request to a language model, and as its first task opens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from environments.contract import SPLITS, Message, Prompt, Target
from environments.targets.catalogue import with_scripted_user

# What a target without any task is asked, where something has to be asked.
NEUTRAL = "Please help me with my request."


def target_prompt(target: Target) -> Prompt:
    """The prompt of a target as its diagnosis tasks show it: instructions and examples of the first task that has some,
    and the union of all tasks' tools, for those that differ by task."""
    target = with_scripted_user(target)
    environment = target.environment()
    shown = Prompt()
    tools: dict[str, Mapping[str, Any]] = {}
    for task in target.tasks("diagnosis"):
        environment.reset(task)
        now = Prompt.of(environment)
        shown = Prompt(shown.instructions or now.instructions, (), shown.examples or now.examples)
        for tool in now.tools:
            tools.setdefault(str(tool["function"]["name"]), tool)
    environment.close()
    return Prompt(shown.instructions, tuple(tools.values()), shown.examples)


def first_opening(target: Target) -> tuple[Prompt, tuple[Message, ...]]:
    """The prompt of a target's first task, and the messages that the task opens with.

    The task is the first one of diagnosis, or of the next split that has any. A target without a task gives an empty
    prompt and a neutral sentence. Conversations of users (`TrafficTarget`) cannot be reset: they raise `TargetError`.
    """
    target = with_scripted_user(target)
    task = next((task for split in SPLITS for task in target.tasks(split)), None)
    if task is None:
        return Prompt(), (Message("user", NEUTRAL),)
    environment = target.environment()
    try:
        first = environment.reset(task).messages
        return Prompt.of(environment), first
    finally:
        environment.close()


def context_text(target: Target) -> str:
    """Policy and tools as they stand once in front of every request."""
    prompt = target_prompt(target)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in prompt.tools)
    return f"## Policy\n{prompt.instructions}\n\n## Tools\n{lines}"
