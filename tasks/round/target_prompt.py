"""A target's policy text and tools, as they stand in front of a request to a language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from environments.contract import Target
from environments.targets.catalogue import builtin_names, load_target
from environments.targets.third_party import model_of_user


def target_context(target: Target) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """(policy text, tools) of a target as its diagnosis tasks show them; tools are a union, for those that differ."""
    if model_of_user(str(getattr(target, "user", ""))) and target.name in builtin_names():
        target = load_target(target.name)  # a model would be paid to open a conversation for every task
    environment = target.environment()
    tools: dict[str, Mapping[str, Any]] = {}
    instructions = ""
    for task in target.tasks("diagnosis"):
        environment.reset(task)
        instructions = instructions or environment.instructions
        for tool in environment.tools:
            tools.setdefault(str(tool["function"]["name"]), tool)
    environment.close()
    return instructions, tuple(tools.values())


def context_text(target: Target) -> str:
    """Policy and tools as they stand once in front of every request."""
    instructions, tools = target_context(target)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f"## Policy\n{instructions}\n\n## Tools\n{lines}"
