"""`trace-agent improve --dry-run`: the plan of any profile, and no round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.improve import ImproveParameters, improve, run_name
from flows.prefect_server import let_schedules_run


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> list[str]:
    """What `preflight` was asked of; the base model's files are not the matter here."""
    seen: list[str] = []
    for place in ("tasks.round.preflight.preflight", "flows.improve.preflight"):
        monkeypatch.setattr(place, lambda settings: seen.append(settings.profile))
    return seen


@pytest.mark.parametrize("profile", ["laptop", "gpu"])
def test_the_command_prints_the_plan_of_any_profile(checked: list[str], tmp_path: Path, profile: str) -> None:
    given = ["improve", "--dry-run", "--profile", profile, "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(app, given, catch_exceptions=False, env={"TRACE_LIMITS__ROLLOUTS": "900"})
    assert done.exit_code == 0, done.output
    assert checked == [profile]
    assert "plan: at most " in done.output
    assert "limits: 900 rollouts" in done.output


def test_the_deployment_takes_it_as_a_parameter(tmp_path: Path, checked: list[str]) -> None:
    given: Any = ImproveParameters(profile="smoke", home=tmp_path / "home", dry_run=True)
    outcome = improve.fn(given)
    assert outcome.round == ""
    assert any(line.startswith("plan: at most ") for line in outcome.checked)
    assert checked == ["smoke"]


def test_a_run_is_named_by_its_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"params": {"profile": "smoke", "seed": 3, "dry_run": True, "fresh": True}}
    monkeypatch.setattr("flows.improve.flow_run", type("Run", (), {"parameters": params}))
    assert run_name() == "improve shop, profile smoke, seed 3"


def test_prefect_s_bulk_inserts_pass_over_what_is_no_column() -> None:
    """Or its scheduler inserts no run (a real server: `tests/integration/test_deployment.py`)."""
    let_schedules_run()
    from prefect.server.database.orm_models import FlowRun, Run

    for kind, name in ((FlowRun, "state"), (Run, "estimated_run_time")):
        assert vars(kind)[name].bulk_dml_setter is not None
    assert let_schedules_run() == []
