"""`trace-agent improve --dry-run`: the plan of any profile, and no round."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from prefect.logging.handlers import APILogHandler
from typer.testing import CliRunner

from environments.validation.checks import ValidationVerdict
from errors import ConfigurationError
from flows.cli.main import app
from flows.improve import ImproveParameters, improve, run_name, until
from settings import Settings

ACCEPTED = ValidationVerdict(True, (), {})


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> list[str]:
    """What `preflight` was asked of; neither the base model's files nor the shop's generators are the matter here."""
    seen: list[str] = []
    for place in ("tasks.round.preflight.preflight", "flows.improve.preflight"):
        monkeypatch.setattr(place, lambda settings: seen.append(settings.profile))
    monkeypatch.setattr("tasks.operations.plan.validated", lambda environment, limits: (environment, ACCEPTED))
    return seen


@pytest.mark.parametrize("profile", ["laptop", "gpu"])
def test_the_command_prints_the_plan_of_any_profile(
    checked: list[str], tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = ["improve", "--dry-run", "--profile", profile, "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(app, given, catch_exceptions=False, env={"TRACE_LIMITS__ROLLOUTS": "900"})
    assert done.exit_code == 0, done.output
    assert checked == [profile]
    assert "plan: at most " in done.output
    assert "limits: 900 rollouts" in done.output
    assert ("a round does not start here: profile gpu trains on a GPU" in done.output) == (profile == "gpu")


def test_a_round_for_a_gpu_does_not_begin_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("flows.improve.play_round", lambda *given: pytest.fail("it begins"))
    given: Any = ImproveParameters(profile="gpu", home=tmp_path / "home")
    with pytest.raises(ConfigurationError, match="this process sees none"):
        improve.fn(given)
    with pytest.raises(ConfigurationError, match="this process sees none"):
        until.fn("train", given)


def test_the_command_looks_for_the_cluster_too(tmp_path: Path) -> None:
    pytest.importorskip("prefect_dask")
    environment = {"TRACE_RUNNER": "dask", "TRACE_RUNNER_ADDRESS": "nowhere"}
    with pytest.raises(ConfigurationError, match="runner_address = 'nowhere' is not an address"):
        CliRunner().invoke(
            app, ["improve", "--dry-run", "--home", str(tmp_path)], catch_exceptions=False, env=environment
        )


def test_the_deployment_takes_it_as_a_parameter(
    tmp_path: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: list[Settings] = []
    for place in ("flows.improve.check_training", "tasks.operations.plan.check_training"):
        monkeypatch.setattr(place, memory.append)
    given: Any = ImproveParameters(profile="smoke", home=tmp_path / "home", dry_run=True)
    outcome = improve.fn(given)
    assert outcome.round == ""
    assert any(line.startswith("plan: at most ") for line in outcome.checked)
    assert checked == ["smoke"]
    assert len(memory) == 1, "it is worked out once"


def test_a_run_is_named_by_its_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, Any] = {"params": {"profile": "smoke", "seed": 3, "dry_run": True, "fresh": True}}
    monkeypatch.setattr("flows.improve.flow_run", type("Run", (), {"parameters": params}))
    assert run_name() == "improve shop, profile smoke, seed 3"
    params["stage"] = "rollout"  # the target may be the default, which the parameters do not have
    assert run_name() == "rollout shop, profile smoke, seed 3"
    params["params"]["profile"] = "none"
    assert run_name() == "rollout"


def test_lines_outside_of_a_flow_are_no_warnings_of_prefect(recwarn: pytest.WarningsRecorder) -> None:
    APILogHandler().emit(logging.makeLogRecord({"name": "trace", "levelno": logging.WARNING, "msg": "no GPU"}))
    assert [str(warned.message) for warned in recwarn] == []
