"""Names of policies and targets. What a target is called by decides what is found of it, whatever its own `name`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from db import ReleaseRow, ReleaseState, open_store
from errors import ConfigurationError
from settings import load_settings
from tasks.measuring.policy_names import PolicyOptions, parse_policy
from tasks.measuring.targets import EvaluateRequest, evaluate_targets, expand
from tests.tasks.counting_target import target

CALLED = "tests.tasks.counting_target:target"


def live(settings_folder: Path) -> None:
    """A release of the target that is called so, of older data."""
    given: dict[str, Any] = {"base": "b", "base_revision": "1", "data_hash": "counting-0", "members": {}}
    with open_store(load_settings(home=settings_folder).database_url) as store:
        store.put([ReleaseRow(id="r1", target=CALLED, number=1, state=ReleaseState.LIVE, **given)])


@pytest.mark.parametrize("policy", ["release", "release@1"])
def test_its_release_is_found_and_only_its_data_are_older(settings_folder: Path, policy: str) -> None:
    live(settings_folder)
    assert target.name != CALLED
    with pytest.raises(ConfigurationError, match=f"release 1 was proven on data counting-0 of {CALLED}"):
        evaluate_targets(EvaluateRequest(CALLED, "test", policy, home=settings_folder), PolicyOptions())


def test_its_adapters_are_looked_for_where_rounds_register_them(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def registered(name: str, settings: object, of: str) -> None:
        asked.append((name, of))
        raise ConfigurationError("enough")

    monkeypatch.setattr("tasks.measuring.policy_names.registered_adapter", registered)
    monkeypatch.setattr("models.local.model_files.check_base", lambda *given: None)
    with pytest.raises(ConfigurationError, match="enough"):
        evaluate_targets(EvaluateRequest(CALLED, "test", "smollm2-135m@cap", home=settings_folder), PolicyOptions())
    assert asked == [("cap", CALLED)]


def test_its_evaluation_is_stored_as_its_rounds_are(settings_folder: Path) -> None:
    row, _ = evaluate_targets(EvaluateRequest(CALLED, "test", "oracle", home=settings_folder), PolicyOptions())
    with open_store(load_settings(home=settings_folder).database_url) as store:
        assert {t.target for t in store.trajectories(None, group_id=row.evaluation)} == {CALLED}
    assert row.target == CALLED


def test_names_of_policies_and_targets() -> None:
    parsed = {
        text: (p.kind, p.model, p.adapter)
        for text in (
            "oracle", "smollm2-135m@find_order@v2", "gpt-4.1", "anthropic/claude-sonnet-4-5", "litellm:x/y",
            "vllm:http://h:8000#base@find", "Qwen/Qwen3-4B", "vertex_ai/model@2025",
        )
        for p in [parse_policy(text)]
    }  # fmt: skip
    assert parsed == {
        "oracle": ("scripted", "oracle", ""),
        "smollm2-135m@find_order@v2": ("local", "smollm2-135m", "find_order@v2"),
        "gpt-4.1": ("chat", "gpt-4.1", ""),
        "anthropic/claude-sonnet-4-5": ("chat", "anthropic/claude-sonnet-4-5", ""),
        "litellm:x/y": ("chat", "x/y", ""),
        "vllm:http://h:8000#base@find": ("vllm", "base", "find"),
        "Qwen/Qwen3-4B": ("local", "Qwen/Qwen3-4B", ""),
        "vertex_ai/model@2025": ("chat", "vertex_ai/model@2025", ""),
    }
    for text, hint in (("orcale", "did you mean oracle[?]"), ("nomodel", "OWNER/NAME, or local:nomodel")):
        with pytest.raises(ConfigurationError, match=f"policy '{text}' is neither a folder .*{hint}"):
            parse_policy(text)
    assert parse_policy("vllm:http://h:8000/v1#base").api_base == "http://h:8000/v1"
    assert expand("tau2") == ["tau2:airline", "tau2:retail", "tau2:telecom"]
    assert expand("toolsandbox") == ["toolsandbox"]
    assert expand("agentdojo") == [f"agentdojo:{suite}" for suite in ("workspace", "travel", "banking", "slack")]
    assert expand("bfcl")[-1] == "bfcl:single"  # the live categories are a report of their own
    assert expand("bfcl:single") == ["bfcl:single"]
