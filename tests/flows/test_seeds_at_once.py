"""Seeds and lanes of a comparison side by side: each a process of its own, with its part of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from db import RoundState
from errors import ConfigurationError, StoreError
from flows import compare_methods as flow
from flows.compare_methods import CompareParameters
from flows.session import alone_in
from models.telemetry.place import here
from settings import load_settings, writable_folder
from tasks.comparison.results import path_of, read_result, write_result
from tasks.methods.preflight import seed_settings
from tasks.methods.seed.seed_run import close_round, diagnose
from tasks.round.context import Context
from tasks.unattended.progress import Meter
from tests.tasks.comparison.seed_files import figures, seed_result
from tests.tasks.methods.letters_target import SIZE
from tests.tasks.methods.seeds_made import BUDGET, seed_run, without_prefect


@pytest.fixture
def played(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Seeds that this process plays itself, and where it said that it was; nothing is checked or opened."""
    seeds: list[tuple[int, str]] = []
    settings = load_settings(home=settings_folder)
    monkeypatch.setattr(flow, "check", lambda params: settings)
    monkeypatch.setattr(flow, "open_registry", lambda settings, target: None)
    monkeypatch.setattr(flow, "_play", lambda params, settings, registry, seed: seeds.append((seed, str(here()))))
    return seeds


def ordered(monkeypatch: pytest.MonkeyPatch, given: CompareParameters) -> tuple[dict[str, Any], Any, Any]:
    """What the flow orders: parameters by the name of a process, places, and what comes after what."""
    seen: list[Any] = []
    monkeypatch.setattr(flow, "run_at_once", lambda *given: seen.append(given))
    monkeypatch.setattr(flow, "parts_of_machine", lambda many: [{"OMP_NUM_THREADS": "1"}] * many)
    flow.compare_methods.fn(given)
    [(commands, places, after)] = seen
    assert {command[1:3] for command in commands.values()} == {("-c", flow.PROCESS)}
    orders = {name: CompareParameters.model_validate_json(command[3]) for name, command in commands.items()}
    return orders, places, after


def test_each_seed_begins_in_a_process_and_each_of_its_lanes_is_one(
    played: list[tuple[int, str]], settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_EXTRA_LOGGERS", "trace")
    names = ["base", "examples", "trace", "single", "placebo-capabilities"]
    given = CompareParameters(budget=900, seeds=[28, 29], methods=names, out=settings_folder, at_once=2)
    orders, places, after = ordered(monkeypatch, given)
    assert places == [{"OMP_NUM_THREADS": "1", "PREFECT_LOGGING_EXTRA_LOGGERS": "trace"}] * 2
    lanes = ["trace + single", "placebo-capabilities", "examples"]
    assert list(orders) == [name for n in (28, 29) for name in (f"seed {n}", *(f"seed {n}: {m}" for m in lanes))]
    assert [orders[f"seed 29{of}"].methods for of in ("", *(f": {m}" for m in lanes))] == [
        ["base"], ["trace", "single"], ["placebo-capabilities"], ["examples"]
    ]  # fmt: skip
    for name, order in orders.items():
        assert name.startswith(f"seed {order.seeds[0]}")
        beside = order.methods in (["placebo-capabilities"], ["examples"])  # these have homes of their own
        same = {"seeds": order.seeds, "methods": order.methods, "at_once": 1, "part_of": names, "beside": beside}
        assert order == given.model_copy(update=same)
    assert {name: set(them) for name, them in after.items() if "28" in name} == {
        "seed 28: placebo-capabilities": {"seed 28", "seed 28: trace + single"},
        "seed 28: trace + single": {"seed 28"},
        "seed 28: examples": {"seed 28"},
    }
    assert played == []


def test_what_a_seed_has_is_told_and_not_played_again(
    played: list[tuple[int, str]], settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {name: figures(1) for name in ("base", "trace", "constant")}
    write_result(settings_folder / "shop-seed-28.json", seed_result(28, there, target="shop"))
    names = ["base", "constant", "examples", "grpo-target", "trace", "single", "placebo-capabilities"]
    given = CompareParameters(budget=900, seeds=[28], methods=names, out=settings_folder, at_once=9)
    orders, places, after = ordered(monkeypatch, given)
    assert {name: order.methods for name, order in orders.items()} == {
        "seed 28": ["base", "constant", "trace"],
        "seed 28: placebo-capabilities": ["placebo-capabilities"],
        "seed 28: grpo-target": ["grpo-target"],
        "seed 28: single": ["single"],
        "seed 28: examples": ["examples"],
    }
    assert {name: set(them) for name, them in after.items()} == {name: {"seed 28"} for name in [*orders][1:]}
    assert len(places) == 4, "no more places than lanes"
    assert not orders["seed 28"].beside, "it opens the seed's home, whatever is told there"


@pytest.mark.parametrize("names", [["trace", "single"], ["base"], ["examples"]])
def test_one_lane_has_the_whole_machine(played: list[tuple[int, str]], settings_folder: Path, names: list[str]) -> None:
    given = CompareParameters(budget=900, seeds=[28], methods=names, out=settings_folder, at_once=2)
    flow.compare_methods.fn(given)
    assert played == [(28, "seed 28")]


def test_a_lane_takes_from_the_seeds_round_while_another_is_at_work_on_it(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes nothing of it, and who holds the seed's home is what has ordered both."""
    without_prefect(monkeypatch)
    run = seed_run(settings_folder, tiny_model)
    diagnose(run)
    settings, store, at_work = run.context.settings, run.context.store, run.context.round.id
    monkeypatch.setattr(Context, "base", run.context.base)
    names = ["base", "constant", "examples"]
    given = CompareParameters(target=settings.target, budget=BUDGET, seeds=[7], out=settings_folder, part_of=names)
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(flow, "log_method", lambda registry, result, name: told.append((name, result.command)))
    monkeypatch.setattr(flow, "seed_settings", lambda settings, seed, budget: run.context.settings)
    with alone_in(settings.folder, ""):
        for name in ("examples", "constant"):
            flow._play(given.model_copy(update={"methods": [name], "beside": True}), settings, Mock(), 7)
            assert store.round(at_work).state == RoundState.RUNNING
        flow._play(given.model_copy(update={"methods": ["base"]}), settings, Mock(), 7)
    assert store.round(at_work).state == RoundState.INTERRUPTED, "the process of the seed's own home closes it"
    result = read_result(path_of(settings_folder, settings.target, 7))
    assert set(result.methods) == set(names)
    assert [name for name, _ in told] == ["examples", "constant", "base"]
    assert all("--methods base,constant,examples" in command for _, command in told), "the whole comparison's"
    purposes = {name: figures.purposes.get("diagnosis", 0) for name, figures in result.methods.items()}
    assert purposes == {"base": 0, "constant": SIZE, "examples": SIZE}, "the diagnosis was lent"
    close_round(run.context)


@pytest.mark.parametrize(("seeds", "at_once"), [([28, 29], 1), ([28], 1)])
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
