"""What `trace-agent targets` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from environments.targets import catalogue
from environments.targets.third_party.adapter import TargetInfo
from flows.cli.main import app


def test_only_what_is_missing_is_said_to_be_missing(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ToolSandbox of another commit is installed, and nobody knows the sizes of its splits."""
    lines = [
        TargetInfo("here", "MIT", {"test": 3}, "abc"),
        TargetInfo("uncounted", "MIT", {}, "abc"),
        TargetInfo("absent", "MIT", missing="no module", how_to_get="run this"),
        TargetInfo("theirs", "", missing="target 'theirs' does not load (KeyError: 'x')"),
    ]
    monkeypatch.setattr(catalogue, "describe_targets", lambda user: lines)
    said = CliRunner().invoke(app, ["targets"]).stdout.splitlines()
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in said}
    assert shown["here"] == "test 3 abc MIT"
    assert shown["uncounted"] == "counted when it is loaded abc MIT"
    assert shown["absent"] == "not installed no module"
    assert shown["theirs"].startswith("does not load target 'theirs' does not load")


def test_what_a_target_prints_when_it_is_loaded_is_no_part_of_the_list(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(user: str) -> list[TargetInfo]:
        print("loading 12 conversations")
        return [TargetInfo("theirs", "MIT", {"test": 3}, "abc")]

    monkeypatch.setattr(catalogue, "describe_targets", loaded)
    done = CliRunner().invoke(app, ["targets", "--json"])
    assert json.loads(done.stdout)[0]["name"] == "theirs"
    assert "loading 12" in done.stderr


def test_a_store_that_is_not_there_is_not_made(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_DATABASE", f"sqlite:///{settings_folder}/mistyped/trace.db")
    monkeypatch.setattr(catalogue, "describe_targets", lambda user: [TargetInfo("here", "MIT", {"test": 3}, "abc")])
    assert CliRunner().invoke(app, ["targets"], catch_exceptions=False).stdout.startswith("here test 3")
    assert not (settings_folder / "mistyped").exists()
