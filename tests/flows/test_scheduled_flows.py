"""What a schedule runs beside rounds: housekeeping tells what it removes and fails on a fault; the watch holds what a
round of the target needs, so it may not hang; and nobody looks when they fail."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.housekeeping as flow_file
import flows.improve as improve_file
import flows.watch as watch_file
from errors import ConfigurationError, ProviderError, StoreError, TargetBusy
from flows.housekeeping import HousekeepingParameters, housekeeping
from flows.improve import ImproveParameters, improve
from flows.watch import WatchParameters, watch
from settings import load_settings
from tasks.housekeeping.findings import Finding, fault, well
from tasks.operations import announcements
from tasks.operations.watch import Watched
from tasks.unattended import stalls
from tasks.unattended.notices import Notice


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, settings_folder: Path) -> Any:
    done: dict[str, Any] = {"told": [], "delivered": 0, "artifacts": []}

    def deliver(settings: Any) -> int:
        done["delivered"] += 1
        return 0

    monkeypatch.setattr(flow_file, "deliver", deliver)
    for place in (flow_file, announcements):
        monkeypatch.setattr(place, "notify", lambda settings, notice: done["told"].append(notice))
    monkeypatch.setattr(flow_file, "create_markdown_artifact", lambda **given: done["artifacts"].append(given))
    load_settings().folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(flow_file, "removals", lambda settings, days, keep: [days, keep])
    monkeypatch.setattr(flow_file, "remove", lambda settings, chosen: 2_500_000_000)
    monkeypatch.setattr(flow_file, "give_up", lambda settings, days, dry_run: [])

    def keep(findings: list[Finding], **given: Any) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(flow_file, "examine", lambda settings: findings)
        return done, housekeeping.fn(HousekeepingParameters(**given))

    keep.done = done  # type: ignore[attr-defined]
    return keep


def test_a_home_that_is_well(run: Any) -> None:
    done, said = run([well("disk", "plenty")], older_than=7)
    assert re.fullmatch(r"2 entries removed, 2\.500 GB freed; .* takes \d\.\d{3} GB now", said)
    assert (done["told"], done["delivered"]) == ([], 1)
    assert "plenty" in done["artifacts"][0]["markdown"]


def test_a_fault_fails_the_run_and_is_told(run: Any) -> None:
    with pytest.raises(StoreError, match=r"1 faults .*disk: full"):
        run([well("clock", "right"), fault("disk", "full", "free space")])
    assert [n.kind for n in run.done["told"]] == ["unwell"]
    assert run.done["delivered"] == 1


def test_what_keeps_it_from_its_work_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*given: Any) -> Any:
        raise StoreError("the database does not answer")

    monkeypatch.setattr(flow_file, "deployment", SimpleNamespace(id="scheduled"))
    monkeypatch.setattr(flow_file, "deaths_before", lambda *target: {"id-1": "green-griffin (no heartbeat for 75 s)"})
    load_settings().folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(flow_file, "removals", locked)
    with pytest.raises(StoreError):
        run([])
    assert [(n.kind, n.text) for n in run.done["told"]] == [
        ("died", "the last housekeeping of shop died: green-griffin (no heartbeat for 75 s); this one begins anew"),
        ("failed", "the housekeeping of shop failed: the database does not answer (the next run tries again)"),
    ]


def test_housekeeping_that_hangs_ends_itself_and_the_next_one_tells(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the one place of its worker: no night would be played after it, and nobody told."""
    held: list[float] = []

    def removals(*given: Any) -> list[Any]:
        held.append(stalls._Watch.seconds)
        return []

    monkeypatch.setattr(flow_file, "removals", removals)
    run([well("disk", "plenty")])
    folder = load_settings().folder / "housekeeping"
    assert (held, stalls._Watch.seconds, list(folder.iterdir())) == ([3600.0], 0.0, [])
    (folder / "hung.machine.7.0a.txt").write_text("Thread 0x1 (most recent call first):")
    for _ in range(2):
        run([well("disk", "plenty")])
    (notice,) = run.done["told"]
    assert (notice.kind, notice.text.partition(" for 60 minutes")[0]) == (
        "hung",
        "the last housekeeping of shop made no progress",
    )
    shutil.rmtree(folder)
    folder.write_text("no file can be made there, as on a full disk, where it has to free space")
    run([well("disk", "plenty")])
    assert held == [3600.0] * 3 + [0.0]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Notice]:
    """What people were told by scheduled runs on a machine where all is well."""
    given: list[Notice] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: given.append(notice))
    monkeypatch.setattr(watch_file, "preflight", lambda settings: None)
    monkeypatch.setattr(watch_file, "deployment", SimpleNamespace(id="scheduled"))
    monkeypatch.setattr(watch_file, "create_markdown_artifact", lambda **given: None)
    monkeypatch.setattr(watch_file, "watch_release", lambda settings: Watched("shop", 0, "nothing is live"))
    return given


def daily(home: Path) -> Any:
    return watch.fn(WatchParameters(target="shop", home=home))


def test_it_is_held_to_its_progress_as_a_round_is(
    settings_folder: Path, said: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[float] = []

    def watched(settings: Any) -> Watched:
        held.append(stalls._Watch.seconds)
        return Watched("shop", 0, "nothing is live")

    monkeypatch.setattr(watch_file, "watch_release", watched)
    assert daily(settings_folder / "home") == "**shop**: nothing is live"
    assert (held, stalls._Watch.seconds, said) == ([3600.0], 0.0, [])
    assert list((settings_folder / "home").iterdir()) == []


@pytest.mark.parametrize("died", [{}, {"id-1": "green-griffin (exited with status 1)"}])
def test_the_next_one_tells_once_that_the_last_one_hung(
    settings_folder: Path, said: list[Notice], monkeypatch: pytest.MonkeyPatch, died: dict[str, str]
) -> None:
    monkeypatch.setattr(watch_file, "deaths_before", lambda target: died)
    (settings_folder / "hung.machine.7.0a.txt").write_text("Thread 0x1 (most recent call first):")
    daily(settings_folder)
    (notice,) = said
    assert notice.kind == "hung"
    assert "the last watch of shop made no progress for 60 minutes" in notice.text
    monkeypatch.setattr(watch_file, "deaths_before", lambda target: {})
    daily(settings_folder)
    assert len(said) == 1


def test_the_next_one_tells_that_the_last_one_was_killed(
    settings_folder: Path, said: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_file, "deaths_before", lambda target: {"id-1": "green-griffin (no heartbeat for 75 s)"})
    daily(settings_folder)
    assert [n.kind for n in said] == ["died"]
    assert "the last watch of shop died: green-griffin (no heartbeat for 75 s)" in said[0].text


def test_why_it_failed_is_told(settings_folder: Path, said: list[Notice], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: Any) -> Watched:
        raise ProviderError("no vLLM server answers")

    monkeypatch.setattr(watch_file, "watch_release", fails)
    with pytest.raises(ProviderError):
        daily(settings_folder)
    assert [n.kind for n in said] == ["failed"]
    assert "the watch of shop failed: no vLLM server answers (the next run tries again)" in said[0].text


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize(
    ("file", "run", "given", "told"),
    [
        (improve_file, improve, ImproveParameters, "a run on tau2:retail ended before it had a round"),
        (watch_file, watch, WatchParameters, "the watch of tau2:retail failed"),
        (flow_file, housekeeping, HousekeepingParameters, "the housekeeping of shop failed"),
    ],
)
def test_parameters_that_cannot_be_are_told(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, scheduled: bool, file: Any, run: Any, given: Any, told: str
) -> None:
    """As those that somebody gave to a schedule in Prefect's UI: nobody looks there in the morning."""
    said: list[str] = []
    monkeypatch.setattr(announcements, "notify", lambda settings, notice: said.append(f"{notice.kind}: {notice.text}"))
    monkeypatch.setattr(file, "deployment", SimpleNamespace(id="scheduled" if scheduled else None))
    why = "profile 'nigth' does not exist"
    with pytest.raises(ConfigurationError, match=why):
        run.fn(
            given(**{n: v for n, v in {"target": "tau2:retail"}.items() if n in given.model_fields}, profile="nigth")
        )
    assert [line[: len(f"failed: {told}: {why}")] for line in said] == [f"failed: {told}: {why}"] * scheduled
    monkeypatch.setenv("TRACE_PROFILE", "dya")  # the machine's own are wrong as well
    with pytest.raises(ConfigurationError, match=why):
        run.fn(given(profile="nigth"))
    assert len(said) == scheduled


def test_that_a_round_is_at_work_is_no_failure(
    settings_folder: Path, said: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(target: str) -> Any:
        raise TargetBusy("another run works on shop")

    monkeypatch.setattr(watch_file, "alone_on", busy)
    assert daily(settings_folder).type == "CANCELLED"
    assert said == []
