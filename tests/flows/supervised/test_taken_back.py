"""What `trace-agent deploy` has taken back on the server, or taken off it, is said by `trace-agent up`, too."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flows import services as services_file
from flows.services import Ports, Services
from settings import load_settings


def test_up_hands_on_what_deploy_changed_that_nobody_asked_for(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's schedule that is the file's again, and the nights that are not made up for (`flows/deploy.py`)."""
    told = [
        "schedule of watch/watch: it was removed, and is '0 12 * * *' UTC, as in prefect.yaml",
        "7 missed runs of the schedules are not made up for",
    ]
    made = ["work pool trace (process) is up to date", "deployment watch/watch"]

    def deployed(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "\n".join([*made, *told]), "")

    monkeypatch.setattr(services_file.subprocess, "run", deployed)
    assert Services(load_settings(home=settings_folder), Ports()).make_deployments() == told
