"""A name that is no setting's is refused wherever it stands, with the one that is meant; and `budget` is said alike."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError
from typer.main import get_command

from errors import ConfigurationError
from flows.cli.main import app
from flows.compare_methods import compare_methods
from flows.housekeeping import housekeeping
from flows.improve import ImproveParameters, improve, until
from flows.watch import watch
from settings import (
    BUDGET,
    NOT_SETTINGS,
    Settings,
    closest_setting,
    load_settings,
    machine_settings,
    setting_names,
    variable_of,
)

ROOT = Path(__file__).parents[1]
# A constant of the method called trace+gepa, and a misspelt name in a test of the command.
NO_VARIABLE = {"TRACE_GEPA", "TRACE_ROLOUT__TASKS"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRACE_ROLOUT__TASKS", "TRACE_ROLLOUT__TASKS"),
        ("TRACE_HOMME", "TRACE_HOME"),
        ("TRACE_TRAIN_STEPS", "TRACE_TRAIN__STEPS"),
        ("TRACE_STEPS", "TRACE_TRAIN__STEPS"),
        ("TRACE_TRAIN__STEPZ", "TRACE_TRAIN__STEPS"),
        ("TRACE_SANDBX", "TRACE_SANDBOX"),
        ("TRACE_LOGJSON", "TRACE_LOG_JSON"),
        ("trace_homme", "TRACE_HOME"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_is_meant(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "secret")
    for read in (load_settings, machine_settings):
        with pytest.raises(ConfigurationError, match=rf"variable {name} = .* did you mean {meant}\? Corr") as raised:
            read()
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("flow", [improve, until, watch, housekeeping, compare_methods], ids=lambda flow: flow.name)
def test_a_misspelt_parameter_of_a_run_is_refused(flow: Any) -> None:
    """Where a run is asked for, by Prefect's server, and in the run: it would do without what was wanted of it, as
    never to remove a conversation."""
    (schema,) = flow.parameters.definitions.values()
    assert schema["additionalProperties"] is False
    needed = {"budget": 1, "seeds": [0], "out": "."} if flow is compare_methods else {}
    stage = {"stage": "rollout"} if flow is until else {}
    flow.validate_parameters({**stage, "params": needed})
    with pytest.raises(ParameterTypeError, match="conversation_older_than"):
        flow.validate_parameters({**stage, "params": {**needed, "conversation_older_than": 90}})


def test_a_variable_like_no_setting_is_refused_too(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_QQQ", "1")
    with pytest.raises(
        ConfigurationError, match=r"TRACE_QQQ = \(not shown\) is no setting; correct its name .*unset it"
    ):
        load_settings()


def test_variables_that_others_made_are_let(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "TRACE_ANALYST__API_KEY_VARIABLE": "TRACE_MY_KEY",  # names the next one
        "TRACE_MY_KEY": "k",
        "TRACE_OTHER_KEY": "k",  # named by the file
        "TRACE_GATEWAY_SERVICE_HOST": "10.0.0.1",  # Kubernetes, for a service called trace-gateway
        "TRACE_GATEWAY_SERVICE_PORT_HTTP": "8900",
        "TRACE_GATEWAY_PORT_8900_TCP_ADDR": "10.0.0.1",
        "TRACE_LOG_JSON": "true",
    }
    Path("trace.toml").write_text('[policy]\napi_key_env = "TRACE_OTHER_KEY"\n')
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert load_settings().analyst.api_key_variable == "TRACE_MY_KEY"
    monkeypatch.setenv("TRACE_METRIC_PORT", "9000")
    with pytest.raises(ConfigurationError, match="did you mean TRACE_METRICS_PORT"):
        load_settings()


def test_every_variable_of_the_repository_is_a_setting_or_listed() -> None:
    """In code, containers, pages and tests alike; and what is listed stands in the file that reads it."""
    command = ["git", "grep", "-hoIwE", "TRACE_[A-Z0-9_]*[A-Z0-9]", "--", f":!tests/{Path(__file__).name}"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    found = set(listing.split())
    assert len(found) > 40
    assert found - {variable_of(name) for name in setting_names()} - {*NOT_SETTINGS} == NO_VARIABLE
    assert [name for name, file in NOT_SETTINGS.items() if name not in (ROOT / file).read_text()] == []


def test_the_pages_list_what_a_person_may_set() -> None:
    text = (ROOT / "docs" / "1-running.md").read_text()
    users = [name for name, file in NOT_SETTINGS.items() if not file.startswith("tests/")]
    assert [name for name in users if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[rollout]\nspeed = 3\n",
            r"setting rollout\.speed = 3 in trace\.toml does not exist; correct its name .*take it",
        ),
        (
            "[rollout]\ntrails = 3\n",
            r"rollout\.trails = 3 in trace\.toml does not exist; did you mean rollout\.trials\?",
        ),
        ("[train]\ntasks = 3\n", r"train\.tasks = 3 in trace\.toml does not exist; did you mean rollout\.tasks\?"),
        (
            "budgets = 3\n",
            r"setting budgets = 3 in trace\.toml does not exist; did you mean budget\? Correct it, or take",
        ),
        ('databse = "postgresql://x:secret@y"\n', r"databse = \(not shown\) in trace\.toml .*did you mean database\?"),
        ("[rolout]\ntasks = 3\n", r"rolout = \(not shown\) in trace\.toml does not exist; did you mean rollout\?"),
    ],
)
def test_an_unknown_key_of_a_file_is_told_with_file_and_what_is_meant(
    settings_folder: Path, text: str, said: str
) -> None:
    Path("trace.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=said) as raised:
        load_settings()
    assert "secret" not in str(raised.value)


def test_an_unknown_key_of_a_profile_names_the_profile(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings_folder / "mine.toml").write_text("[selection]\nmots = 2\n")
    monkeypatch.setattr("settings.PROFILES", settings_folder)
    with pytest.raises(ConfigurationError, match=r"selection\.mots = 2 in mine\.toml does .* mean selection\.most\?"):
        load_settings(profile="mine")


def test_of_settings_that_are_called_alike_the_nearest_is_meant() -> None:
    assert closest_setting("synthesiser.kind") == "synthesizer.kind"
    assert closest_setting("analist.kind") == "analyst.kind"


def test_the_budget_is_said_alike_everywhere() -> None:
    """It is what `Settings.training_steps` derives the steps from, and caps nothing."""
    options = {o.name: o for o in get_command(app).commands["improve"].params}  # type: ignore[attr-defined]
    assert options["budget"].help == BUDGET
    assert Settings.model_fields["budget"].description == BUDGET
    assert ImproveParameters.model_fields["budget"].description == BUDGET
    page = (ROOT / "docs" / "1-running.md").read_text()
    beginning, _, end = BUDGET.partition("; ")
    assert beginning in page
    assert end in page
