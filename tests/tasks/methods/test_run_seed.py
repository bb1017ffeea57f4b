"""What a seed owes: files that lie beside each other, work that is in no home, the command that plays it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from db import StageRow, open_store
from errors import ConfigurationError
from flows.compare_methods import command_of
from models.adapters.registry import Registry
from settings import load_settings
from tasks.comparison.results import changed_settings, path_of, read_result, write_result
from tasks.comparison.tracking import log_method
from tasks.methods import run as running
from tasks.methods.run import head_of, run_method, run_seed
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import SeedRun, close_round
from tests.tasks.comparison.seed_files import FAMILIES, figures, seed_result
from tests.tasks.methods.seeds_made import seed_run, without_prefect


@pytest.fixture
def run(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeedRun]:
    without_prefect(monkeypatch)
    made = seed_run(settings_folder, tiny_model)
    yield made
    close_round(made.context)


def test_what_another_file_of_the_seed_has_is_not_run_again(
    run: SeedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, made = head_of(run, "trace-agent compare-methods", "test"), list[str]()

    def measured(run: SeedRun, name: str) -> Any:
        made.append(name)
        return figures(1, outcomes={t: [1.0] for t in head.families}, shift={t: [0.0] for t in head.shift})

    monkeypatch.setattr(running, "run_method", measured)
    path = tmp_path / "letters-seed-7.json"
    write_result(tmp_path / "letters-seed-7-more.json", head.with_method("trace", measured(run, "trace")))
    result = run_seed(run, ["base", "trace"], path, head, lambda result, name: None)
    assert made == ["trace", "base"]
    assert list(result.methods) == ["base"]
    other = head.model_copy(update={"settings": "other"})
    write_result(tmp_path / "letters-seed-7-apart.json", other)
    with pytest.raises(ConfigurationError, match="another settings"):
        run_seed(run, ["noop"], path, head, lambda result, name: None)


def test_what_another_process_has_written_meanwhile_stays(
    run: SeedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands with other methods of one seed: who ends last does not write over hours of the other."""
    head, path = head_of(run, "trace-agent compare-methods", "test"), tmp_path / "out" / "letters-seed-7.json"
    made = figures(1, outcomes={t: [1.0] for t in head.families}, shift={t: [0.0] for t in head.shift})

    def meanwhile(run: SeedRun, name: str) -> Any:
        write_result(path, head.with_method("constant", made))
        return made

    monkeypatch.setattr(running, "run_method", meanwhile)
    run_seed(run, ["base"], path, head, lambda result, name: None)
    assert list(read_result(path).methods) == ["base", "constant"], "in the order of the table"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"families": {"t00": "low"}}, "list of test tasks"),
        ({"shift": {"s00": "both"}}, "list of shift tasks"),
        ({"drawn": True}, "origin of its test tasks"),
    ],
)
def test_a_seed_that_cannot_stand_in_the_table_of_the_others_is_refused_before_it_is_played(
    run: SeedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    """Else it was found out when the table was drawn, after hours."""
    head = head_of(run, "trace-agent compare-methods", "test")
    monkeypatch.setattr(running, "run_method", lambda run, name: pytest.fail(f"{name} is played"))
    path = path_of(tmp_path, head.target, 7)
    write_result(path_of(tmp_path, head.target, 8), head.model_copy(update={"seed": 8, **changed}))
    with pytest.raises(ConfigurationError, match=f"seeds 7 and 8 of .* have another {said}.*cannot stand in one table"):
        run_seed(run, ["base"], path, head, lambda result, name: None)
    assert not path.exists()
    assert run.context.store.query("SELECT id FROM trajectories").empty


def test_figures_that_the_tracking_server_does_not_take_end_no_seed(
    run: SeedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file has them, and the same command tells the server once more."""
    head = head_of(run, "trace-agent compare-methods", "test")
    made = figures(1, outcomes={t: [1.0] for t in head.families}, shift={t: [0.0] for t in head.shift})
    monkeypatch.setattr(running, "run_method", lambda run, name: made)
    path, told = tmp_path / "letters-seed-7.json", list[str]()

    def away(result: Any, name: str) -> None:
        raise OSError("server away")

    run_seed(run, ["base", "noop"], path, head, away)
    assert list(read_result(path).methods) == ["base", "noop"]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["server away" in said for said in warned] == [True, True]
    run_seed(run, ["base", "noop", "constant"], path, head, lambda result, name: told.append(name))
    assert told == ["base", "noop", "constant"]


@pytest.mark.parametrize(
    ("name", "need"),
    [("single", "trace"), ("mixed", "trace"), ("placebo-capabilities", "trace"), ("placebo-single", "placebo-rewards")],
)
def test_what_takes_the_work_of_a_method_that_another_home_played_is_refused(
    run: SeedRun, name: str, need: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the bare base would answer under the method's name, and a placebo's capabilities be drawn beside others.
    Not even the seed's diagnosis is played for it."""
    monkeypatch.setattr(type(run.context.base.policy), "submit", lambda *given, **more: pytest.fail("it plays"))
    with pytest.raises(ConfigurationError, match=f"{name} takes the work of {need}.*in another home.*--home"):
        run_method(run, name)
    assert run.context.store.rows(StageRow, round_id=run.context.round.id) == []
    assert run.context.store.query("SELECT id FROM trajectories").empty


def test_what_takes_the_work_of_a_method_with_a_home_of_its_own_finds_it_there(
    run: SeedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`placebo-single` works in the home of `placebo-rewards`, whose account is in no other."""
    there = run.context.settings.folder / "placebo-rewards"
    there.mkdir()
    with open_store(run.context.settings.model_copy(update={"home": there}).database_url) as store:
        Account.open(store, "placebo-rewards", run.episodes, (), lambda: 0.0)
    monkeypatch.setattr(running, "diagnose", lambda run: pytest.fail("it goes on to the diagnosis"))
    with pytest.raises(pytest.fail.Exception, match="goes on to the diagnosis"):
        run_method(run, "placebo-single")


def test_a_file_says_what_is_set_otherwise_and_its_command_sets_it_again(
    run: SeedRun, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACE_TRAIN__LEARNING_RATE", "2e-4")
    monkeypatch.setenv("TRACE_ROUTER", "label")
    settings = load_settings(profile="bfcl", target="bfcl:single", home=settings_folder / "home", seed=3, budget=2000)
    assert changed_settings(settings) == {"train.learning_rate": 2e-4, "router": "label"}
    command = command_of(settings, 65, 3000, ["base", "grpo-target"])
    assert command.startswith("TRACE_ROUTER=label TRACE_TRAIN__LEARNING_RATE=0.0002 trace-agent compare-methods ")
    assert command.endswith(" --methods base,grpo-target")
    curve = command_of(settings, 65, 3000, ["base", "grpo-target"], 5)
    assert curve == f"{command} --curve 5", "else what it gives has no curve"
    for profile in ("laptop", "night", "smoke", "gpu"):
        monkeypatch.delenv("TRACE_TRAIN__LEARNING_RATE", raising=False)
        monkeypatch.delenv("TRACE_ROUTER", raising=False)
        assert changed_settings(load_settings(profile=profile, home=settings_folder / "home")) == {}
    assert head_of(run, "", "").changed["train.learning_rate"] == run.context.settings.train.learning_rate


def test_other_outcomes_of_a_method_are_another_run(tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path / 'mlflow.db'}", "shop", tmp_path / "artifacts")
    one = seed_result(7, {"trace": figures(12)})
    other_data = one.model_copy(update={"data_hash": "d2"})
    for result in (one, one, other_data, seed_result(7, {"trace": figures(9)})):
        log_method(registry, result, "trace")
    found = registry.client.search_runs([registry.experiment_id])
    assert sorted(run.data.metrics["test/success"] * 24 for run in found) == pytest.approx([9, 12, 12])
    assert {run.data.tags["data_hash"] for run in found} == {"d1", "d2"}


def test_a_family_of_two_services_has_a_metric(tmp_path: Path) -> None:
    """BFCL's and AgentDojo's families are called by all services that they need, with a plus between."""
    registry = Registry(f"sqlite:///{tmp_path / 'mlflow.db'}", "bfcl", tmp_path / "artifacts")
    families = dict.fromkeys(FAMILIES, "files+trading")
    log_method(registry, seed_result(7, {"trace": figures(12)}, families=families), "trace")
    (found,) = registry.client.search_runs([registry.experiment_id])
    assert found.data.metrics["test/success/files_trading"] == pytest.approx(0.5)
