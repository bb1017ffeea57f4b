"""What a round says it was made by."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from flows.code_version import VARIABLE, code_version

ROOT = Path(__file__).parents[2]


def test_a_checkout_says_its_own_commit_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0000000")
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert code_version() == f"{version('trace-agent')}+{head}"


def test_an_image_says_the_commit_that_it_was_built_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # the image has no git
    monkeypatch.setenv(VARIABLE, "1a2b3c4")
    assert code_version() == f"{version('trace-agent')}+1a2b3c4"
    monkeypatch.setenv(VARIABLE, "")  # built without the argument
    assert code_version() == version("trace-agent")
