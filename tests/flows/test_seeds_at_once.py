"""Seeds of a comparison side by side: each is ordered as a process of its own, with its part of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from errors import ConfigurationError, StoreError
from flows import compare_methods as flow
from flows.compare_methods import CompareParameters
from flows.session import alone_in
from models.telemetry.place import here
from settings import load_settings, writable_folder
from tasks.methods.preflight import seed_settings
from tasks.unattended.progress import Meter


@pytest.fixture
def played(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Seeds that this process plays itself, and where it said that it was; nothing is checked or opened."""
    seeds: list[tuple[int, str]] = []
    settings = load_settings(home=settings_folder)
    monkeypatch.setattr(flow, "check", lambda params: settings)
    monkeypatch.setattr(flow, "open_registry", lambda settings, target: None)
    monkeypatch.setattr(flow, "_play", lambda params, settings, registry, seed: seeds.append((seed, str(here()))))
    return seeds


def test_each_seed_is_a_process_with_its_part_of_the_machine(
    played: list[tuple[int, str]], settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered: list[Any] = []
    monkeypatch.setattr(flow, "run_at_once", lambda *given: ordered.append(given))
    monkeypatch.setattr(flow, "parts_of_machine", lambda many: [{"OMP_NUM_THREADS": "1"}] * many)
    monkeypatch.setenv("PREFECT_LOGGING_EXTRA_LOGGERS", "trace")
    given = CompareParameters(budget=900, seeds=[28, 29, 30], methods=["base"], out=settings_folder, at_once=2)
    files = flow.compare_methods.fn(given)
    assert files == ["shop-seed-28.json", "shop-seed-29.json", "shop-seed-30.json"]
    [(commands, places)] = ordered
    assert places == [{"OMP_NUM_THREADS": "1", "PREFECT_LOGGING_EXTRA_LOGGERS": "trace"}] * 2
    assert list(commands) == ["seed 28", "seed 29", "seed 30"]
    for seed, command in zip(given.seeds, commands.values(), strict=True):
        assert command[1:3] == ("-c", flow.SEED)
        said = CompareParameters.model_validate_json(command[3])
        assert said == given.model_copy(update={"seeds": [seed], "at_once": 1})
    assert played == []


@pytest.mark.parametrize(("seeds", "at_once"), [([28, 29], 1), ([28], 2)])
def test_one_after_another_they_are_played_here_and_lines_say_which(
    played: list[tuple[int, str]], settings_folder: Path, seeds: list[int], at_once: int
) -> None:
    flow.compare_methods.fn(CompareParameters(budget=900, seeds=seeds, out=settings_folder, at_once=at_once))
    assert played == [(seed, f"seed {seed}") for seed in seeds]


def test_a_seed_that_another_process_plays_is_left_to_it(settings_folder: Path) -> None:
    """Both would train each method in the same folder, and pay for it from the same budget."""
    settings, given = (
        load_settings(home=settings_folder),
        CompareParameters(budget=900, seeds=[28], out=settings_folder),
    )
    folder = writable_folder(seed_settings(settings, 28, 900).folder)
    with alone_in(folder, ""), pytest.raises(ConfigurationError, match=r"another comparison plays seed 28 in .*; wait"):
        flow._play(given, settings, Mock(), 28)
    assert list(folder.iterdir()) == []


def test_a_setting_that_does_not_hold_is_told_before_the_seeds_part(
    played: list[tuple[int, str]],
    settings_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each seed's process would say it once more."""
    settings = load_settings(home=settings_folder, devices={"trainings": 2})
    monkeypatch.setattr(flow, "check", lambda params: settings)
    given = CompareParameters(budget=900, seeds=[28], out=settings_folder)
    with caplog.at_level("INFO", logger="trace"):
        flow.compare_methods.fn(given)
        flow.warn(given, load_settings(home=settings_folder))
        assert "devices.trainings" not in caplog.text
        flow.warn(given, settings)
    assert caplog.text.count("devices.trainings = 2 does not hold for a comparison") == len(played) == 1


def test_the_process_of_a_seed_plays_it_or_says_what_is_wrong(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = CompareParameters(budget=900, seeds=[28], out=settings_folder)
    seen: list[CompareParameters] = []
    monkeypatch.setattr(flow, "end_with_parent", lambda: None)
    monkeypatch.setattr(Meter, "bars", True)
    monkeypatch.setattr(flow, "compare_methods", seen.append)
    assert flow.main(given.model_dump_json()) == 0
    assert (seen, Meter.bars) == ([given], False)

    def fails(params: CompareParameters) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(flow, "compare_methods", fails)
    assert flow.main(given.model_dump_json()) == 1
    said = json.loads(capsys.readouterr().out)
    assert said == {"error": "StoreError", "message": "the disk is full", "transient": False}
