"""What `trace-agent evaluate` takes, and that standard output holds its result and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from errors import ConfigurationError
from flows.cli.main import app

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


@pytest.mark.parametrize("option", ["--target", "--policy"])
def test_two_of_what_a_run_takes_one_of_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["evaluate", "--target", "shop", option, "one", option, "two"])
    assert isinstance(result.exception, ConfigurationError)
    assert f"{option} is given " in str(result.exception)
    assert "one, two), and a run takes one; evaluate each by itself" in str(result.exception)
