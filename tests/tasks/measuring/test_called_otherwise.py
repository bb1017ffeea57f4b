"""A target of one's own whose `name` is not what it is called by: all is stored and found under what it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from db import ReleaseRow, ReleaseState, open_store
from errors import ConfigurationError
from settings import load_settings
from tasks.measuring.policy_names import PolicyOptions
from tasks.measuring.targets import EvaluateRequest, evaluate_targets
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
