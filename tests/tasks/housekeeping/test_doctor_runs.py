"""The doctor's look at what should run at night, by what Prefect's server says of the deployments."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import DeploymentStatus

from tasks.housekeeping import run_checks

ASKED = datetime(2026, 11, 3, 4, 5, tzinfo=UTC)


def deployment(name: str, ready: bool = True, paused: bool = False, active: bool = True) -> Any:
    status = DeploymentStatus.READY if ready else DeploymentStatus.NOT_READY
    schedules = [SimpleNamespace(active=active)]
    return SimpleNamespace(name=name, paused=paused, schedules=schedules, status=status, last_polled=ASKED)


@pytest.mark.parametrize(
    ("found", "late", "level", "said"),
    [
        ([], 0, "ok", "the Prefect server has no deployment of this project ('trace-agent deploy' makes them)"),
        ([deployment("a"), deployment("b", active=False)], 0, "ok", "a is scheduled; b is run by hand"),
        ([deployment("improve", ready=False, paused=True)], 0, "ok", "improve is paused"),
        ([deployment("watch", ready=False, active=False)], 0, "ok", "watch is run by hand"),
        (
            [deployment("improve", ready=False), deployment("watch")], 3, "warning",
            "nobody asks for runs of improve (the last time 2026-11-03 04:05 UTC): nights do not happen",
        ),
        ([deployment("improve")], 3, "warning", "3 runs are late: they wait for a worker that has room"),
        ([deployment("improve")], 200, "warning", "200 or more runs are late: they wait for a worker that has room"),
    ],
)  # fmt: skip
def test_a_night_that_nobody_would_run_is_told(
    monkeypatch: pytest.MonkeyPatch, found: list[Any], late: int, level: str, said: str
) -> None:
    monkeypatch.setattr(run_checks, "_asked", lambda: (found, late))
    finding = run_checks.scheduled_runs()
    assert (finding.check, finding.level, finding.said) == ("runs", level, said)
    assert bool(finding.do) == (level != "ok")


def test_a_server_that_does_not_say_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(run_checks, "_asked", refuse)
    finding = run_checks.scheduled_runs()
    assert (finding.level, finding.said) == (
        "fault",
        "Prefect's server does not say what it runs (ConnectError: refused)",
    )
    assert "PREFECT_API_AUTH_STRING" in finding.do


def test_what_a_server_fails_with_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's words hold the whole address, and what is cut off of them may begin within the password."""
    request = httpx.Request("POST", f"http://{'trace' * 28}:sesame@127.0.0.1:4200/api/deployments/filter")
    monkeypatch.setattr(run_checks, "_asked", lambda: httpx.Response(500, request=request).raise_for_status())
    finding = run_checks.scheduled_runs()
    assert "HTTPStatusError: Server error '500 Internal Server Error' for url 'http://127.0.0.1:4200" in finding.said
    assert "trace:s" not in finding.said
