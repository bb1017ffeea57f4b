"""The weekly flow: what it removes is told, a fault fails the run and is told, notices that wait are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flows.housekeeping as flow_file
from errors import StoreError
from flows.housekeeping import HousekeepingParameters, housekeeping
from tasks.housekeeping.findings import Finding, fault, well


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> Any:
    done: dict[str, Any] = {"told": [], "delivered": 0, "artifacts": []}

    def deliver(settings: Any) -> int:
        done["delivered"] += 1
        return 0

    monkeypatch.setattr(flow_file, "deliver", deliver)
    monkeypatch.setattr(flow_file, "notify", lambda settings, notice: done["told"].append(notice))
    monkeypatch.setattr(flow_file, "create_markdown_artifact", lambda **given: done["artifacts"].append(given))
    monkeypatch.setattr(flow_file, "removals", lambda settings, days, keep: [days, keep])
    monkeypatch.setattr(flow_file, "remove", lambda chosen: 2_500_000_000)

    def keep(findings: list[Finding], **given: Any) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(flow_file, "examine", lambda settings: findings)
        return done, housekeeping.fn(HousekeepingParameters(**given))

    keep.done = done  # type: ignore[attr-defined]
    return keep


def test_a_home_that_is_well(run: Any) -> None:
    done, said = run([well("disk", "plenty")], older_than=7)
    assert said == "2 removed, 2.500 GB freed"
    assert (done["told"], done["delivered"]) == ([], 1)
    assert "plenty" in done["artifacts"][0]["markdown"]


def test_a_fault_fails_the_run_and_is_told(run: Any) -> None:
    with pytest.raises(StoreError, match=r"1 faults .*disk: full"):
        run([well("clock", "right"), fault("disk", "full", "free space")])
    assert [n.kind for n in run.done["told"]] == ["unwell"]
    assert run.done["delivered"] == 1
