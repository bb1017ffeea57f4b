"""What an option takes, and that standard output holds the result of `trace-agent evaluate` and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from errors import ConfigurationError
from flows.cli.main import app
from flows.cli.options import AsJson, Commands

ROOT = Path(__file__).parents[3]
LOUD = """
from tests.tasks.counting_target import Counting, CountingTarget

print("my data is loaded")


class Loud(Counting):
    def step(self, action):
        print("my step")
        return super().step(action)


class LoudTarget(CountingTarget):
    def environment(self):
        return Loud()


target = LoudTarget()
"""


def test_what_a_target_prints_is_no_part_of_the_result(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings_folder / "loud_target.py").write_text(LOUD)
    monkeypatch.syspath_prepend(settings_folder)
    given = ["evaluate", "--target", "loud_target:target", "--policy", "oracle", "--home", str(settings_folder)]
    result = CliRunner().invoke(app, [*given, "--json"])
    assert [row["policy"] for row in json.loads(result.stdout)] == ["oracle", "noop"]
    assert "my data is loaded" in result.stderr
    assert "my step" in result.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [("evaluate --target shop", "--policy"), ("improve", "--seed"), ("db upgrade", "--home"), ("doctor", "--profile")],
)
def test_an_option_with_one_value_is_not_given_twice(command: str, option: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), option, "1", option, "2"])
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception) == f"{option} is given 2 times and takes one value; give it once"


def test_an_option_with_many_values_and_a_switch_may_be_repeated() -> None:
    some = Commands()

    @some.command()
    def made(scope: Annotated[list[str], typer.Option()], as_json: AsJson = False) -> None:
        typer.echo(f"{scope} {as_json}")

    result = CliRunner().invoke(some, ["--scope", "a", "--scope", "b", "--json", "--json"])
    assert result.output.strip() == "['a', 'b'] True"


def test_files_of_a_users_own_may_be_called_like_modules_of_the_project(tmp_path: Path) -> None:
    """They were imported in the place of the project's, and the command ended in a traceback."""
    for name in ("settings", "db", "tasks", "environments"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user')\n")
    (tmp_path / "my_desk.py").write_text("from tests.tasks.counting_target import CountingTarget as target\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_")} | {"PYTHONPATH": str(ROOT)}
    given = ["evaluate", "--target", "my_desk:target", "--policy", "oracle", "--home", "runs"]
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", *given]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "oracle" in done.stdout
