"""What an option takes, and that standard output holds the result of `trace-agent evaluate` and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from errors import ConfigurationError
from flows.cli.main import app
from flows.cli.options import AsJson, Commands

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
