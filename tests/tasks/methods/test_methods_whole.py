"""All methods of one seed on a tiny model: what they share, what they pay, what their file says, and a kill amid it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from db import (
    GENERALIST,
    AdapterRow,
    CalibrationRow,
    EnvironmentRow,
    EnvironmentState,
    LabelRow,
    StageRow,
    Store,
    open_store,
    row_id,
)
from errors import TrainingError
from tasks.comparison.results import SeedResult, read_result
from tasks.comparison.tracking import metrics_of
from tasks.methods import run as running
from tasks.methods.catalogue import METHODS
from tasks.methods.run import head_of, run_seed
from tasks.methods.seed.budget import TEST, Account
from tasks.methods.seed.seed_run import SeedRun, close_round
from tasks.round.adapters import adapter_id, before_practice, own_adapter
from tasks.round.results import RolloutResult, SelectResult, SynthesizeResult, TrainResult
from tasks.synthesis.calibration import HINT
from tasks.synthesis.learning.training import training_settings
from tasks.synthesis.starting import starts_for
from tests.tasks.methods.letters_target import FAMILIES, SHIFTED, SIZE, solved
from tests.tasks.methods.seeds_made import BUDGET, TRAIN, charged_and_stored, seed_run, without_prefect

THERE = [name for name, method in METHODS.items() if not method.package or importlib.util.find_spec(method.package)]
ALL = [*THERE, GENERALIST, "placebo-single"]  # in the order of their runs
OWN_HOMES = sorted({place for name in THERE if (place := METHODS[name].place(name))})
KILLED = ["base", "examples", "grpo-target", "trace", "placebo-rewards"]


class Died(BaseException):
    """What stands for SIGKILL: nothing of the project catches it."""


@pytest.fixture(autouse=True)
def _bare_stages(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_prefect(monkeypatch)


def raising(problem: Exception) -> Callable[..., Any]:
    def refuse(*given: Any, **more: Any) -> Any:
        raise problem

    return refuse


def run_all(run: SeedRun, path: Path, names: list[str]) -> SeedResult:
    head = head_of(run, "trace-agent compare-methods", "test")
    return run_seed(run, names, path, head, lambda result, name: None)


def stores_of(run: SeedRun) -> Iterator[Store]:
    """The databases of a seed: its own, and those of methods with a home of their own."""
    yield run.context.store
    for name in (*OWN_HOMES, "gepa/trace-gepa"):
        file = run.context.settings.folder / name / "trace.db"
        if file.is_file():
            yield open_store(f"sqlite:///{file}")


def ids(store: Store, query: str) -> set[str]:
    return set(store.query(f"SELECT {query}")["id"])


def without_seconds(result: SeedResult) -> dict[str, Any]:
    return {name: figures.model_dump() | {"seconds": 0.0} for name, figures in result.methods.items()}


def test_every_method_of_a_seed(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = seed_run(settings_folder, tiny_model), settings_folder / "results" / "seed.json"
    result = run_all(run, path, ALL)
    assert list(result.methods) == ALL
    assert read_result(path) == result
    tasks = {t.id for t in run.context.tasks("test")}
    for name, figures in result.methods.items():
        assert set(figures.outcomes) == tasks, "every method is measured on the same tasks"
        assert {len(trials) for trials in figures.outcomes.values()} == {2}
        assert len(figures.shift) == SHIFTED, "and on the same shift test"
        assert {len(trials) for trials in figures.shift.values()} == {2}
        assert figures.episodes == sum(n for what, n in figures.purposes.items() if what != TEST) <= BUDGET
        # Behind another prompt the diagnosis is played once more.
        changed = not any("; 0 examples, instructions as they were" in note for note in figures.notes)
        prompted = name == "trace+gepa" and changed
        diagnosed = {"base": 0, "noop": 0, "demonstrations": 0}.get(name, 2 * SIZE if prompted else SIZE)
        assert figures.purposes.get("diagnosis", 0) == diagnosed
        assert metrics_of(result, name)["episodes"] == figures.episodes
    trained = [result.methods[name] for name in ("grpo-target", "grpo-target-own", "trace", "mixed", "placebo-rewards")]
    assert all(figures.purposes["training"] >= 8 for figures in trained)
    assert result.needs == {family: list(needs) for family, needs in FAMILIES.items()}
    assert {*result.methods["trace"].trained} <= {GENERALIST, *(need for needs in FAMILIES.values() for need in needs)}
    assert result.methods["trace"].trained
    assert run.context.result(SelectResult).selected[-1] == GENERALIST
    learnt = run.context.result(TrainResult, GENERALIST)
    assert GENERALIST in result.methods["trace"].trained, "it was made last, of what all others have solved"
    environment = run.context.store.row(EnvironmentRow, id=run.context.result(SynthesizeResult, GENERALIST).environment)
    assert environment is not None
    assert (environment.spec["families"], environment.state) == (["high", "low"], EnvironmentState.ACCEPTED)
    assert learnt.steps == learnt.chosen > 0
    own = ids(run.context.store, f"id FROM trajectories WHERE purpose = 'training' AND adapter_id = '{learnt.adapter}'")
    assert not own, "nothing is played for its training"
    iterated = result.methods["expert-iteration"]
    assert iterated.purposes["training"] > SIZE, "more than one sample of each diagnosis task"
    assert iterated.outcomes != result.methods["base"].outcomes
    distilled = result.methods["context-distillation"]
    assert "training" not in distilled.purposes, "the letters have no reference solution to show: the diagnosis is all"
    assert [note.split(",")[0] for note in distilled.notes] == ["iteration 1: 0 episodes", "iteration 2: 0 episodes"]
    assert distilled.outcomes != result.methods["base"].outcomes
    cloned = result.methods["demonstrations"]
    assert (cloned.episodes, cloned.outcomes) == (0, result.methods["base"].outcomes)
    none = "the target has no reference solutions of new scenarios, so the bare base answers"
    assert cloned.notes == result.methods["demonstrations-grpo"].notes == (none,)
    for name in ("single", "generalist", "merge-linear", "merge-ties", "trace-oracle-route"):
        assert result.methods[name].episodes == result.methods["trace"].episodes, "the adapters are TRACE's"
        assert result.methods[name].outcomes != result.methods["base"].outcomes
        assert result.methods[name].seconds >= result.methods["trace"].seconds
    placebo, alone = result.methods["placebo-rewards"], result.methods["placebo-single"]
    assert alone.episodes == placebo.episodes, "the adapters are the placebo's"
    assert alone.seconds >= placebo.seconds
    assert alone.outcomes not in (result.methods["base"].outcomes, result.methods["single"].outcomes)
    assert result.methods["mixed"].purposes["calibration"] == result.methods["trace"].purposes["calibration"]
    for name in ("grpo-target", "grpo-target-own", "mixed"):
        figures = result.methods[name]
        counts = [point.count for point in figures.rollouts]
        assert len(counts) == 2
        assert SIZE < counts[0] < counts[1] <= figures.episodes
        assert all(set(point.outcomes) == tasks for point in figures.rollouts)
    # Every episode that is stored was charged, in every home; and the diagnosis was played once.
    for store in stores_of(run):
        assert ids(store, "trajectory_id AS id FROM episode_charges") == ids(store, "id FROM trajectories")
    diagnosis = [ids(store, "id FROM trajectories WHERE purpose = 'diagnosis'") for store in stores_of(run)]
    assert len(diagnosis) == 1 + len(OWN_HOMES) + ("trace+gepa" in ALL)
    assert all(part >= diagnosis[0] for part in diagnosis)
    # What is in the file is not run again.
    monkeypatch.setattr(running, "run_method", lambda *given: pytest.fail("run again"))
    assert run_all(run, path, ALL) == result
    close_round(run.context)


FROM_A_GENERALIST = ["trace", "mixed", "placebo-capabilities", "generalist-grpo"]


def test_a_generalist_that_comes_first_is_mined_and_gone_on_from(settings_folder: Path, tiny_model: Any) -> None:
    run = seed_run(settings_folder, tiny_model, train=TRAIN | {"demonstrations": 4})
    methods = run_all(run, settings_folder / "seed.json", FROM_A_GENERALIST).methods
    figures, mixed, context = methods["trace"], methods["mixed"], run.context
    base, rolled = context.result(RolloutResult), context.stored.diagnosis()
    mine = own_adapter(context.stored, GENERALIST)
    frame = context.store.trajectory_frame(None, id=rolled.trajectories)
    assert set(frame["adapter_id"].dropna()) == {mine}
    assert set(frame[frame["adapter_id"].isna()]["id"]) < set(base.trajectories), "what the base would answer"
    assert frame["task_id"].nunique() == len(frame) == len(base.trajectories) == SIZE
    labelled = {row.trajectory_id for row in context.store.rows(LabelRow, round_id=context.round.id)}
    assert labelled <= set(rolled.trajectories), "what both lack is looked for"
    assert labelled
    selected = context.result(SelectResult).selected
    assert selected[-1] == GENERALIST
    for capability in selected[:-1]:
        identity = row_id(context.result(SynthesizeResult, capability).environment, "calibration")
        calibration = context.store.row(CalibrationRow, id=identity)
        assert calibration is not None
        assert mine in calibration.policy_id or calibration.policy_id != context.policy.identity().id
        if trained := context.found(TrainResult, capability):
            assert GENERALIST in {start.capability for start in trained.starts}
    assert figures.purposes["routing"] >= SIZE, "its diagnosis is paid for"
    rows = {row.id: row for row in context.store.rows(AdapterRow, round_id=context.round.id)}
    assert rows[adapter_id(context.round.id, "mixed")].config["start"] == rows[mine].sha256, "as TRACE's trainings do"
    assert mixed.purposes["routing"] == SIZE, "it pays for what was mined, and for nothing else of the router's"
    seconds = {row.name: row.seconds for row in context.store.rows(StageRow, round_id=context.round.id)}
    start = ("train:generalist", "rollout:generalist")
    assert mixed.seconds >= sum(seconds[name] or 0.0 for name in start) > 0, "and for the time that its start took"
    plain = methods["generalist-grpo"]
    assert rows[adapter_id(context.round.id, "generalist-grpo")].config["start"] == rows[mine].sha256
    assert plain.purposes["training"] >= 8
    assert not {"calibration", "routing"} & set(plain.purposes), "nothing was shown, and nothing was mined"
    assert plain.seconds >= (seconds["train:generalist"] or 0.0)
    charged, stored = charged_and_stored([context])
    assert charged == stored
    placebo = methods["placebo-capabilities"]
    assert GENERALIST in placebo.trained, "what differs is what was selected, not the generalist"
    assert placebo.purposes["routing"] >= SIZE
    close_round(context)


def test_what_goes_on_from_a_generalist_pays_for_what_that_was_shown_and_practised_with(
    settings_folder: Path, tiny_model: Any
) -> None:
    """It was played before, by TRACE, and costs the others the same."""
    train = TRAIN | {"demonstrations": 4, "shown": 2, "hints": 0.5, "practice": 2}
    run = seed_run(settings_folder, tiny_model, target=solved.name, budget=500, train=train)
    result = run_all(run, settings_folder / "seed.json", ["trace", "generalist-grpo"]).methods
    context, store = run.context, run.context.store
    own, before = own_adapter(context.stored, GENERALIST), before_practice(store, context.round.id)
    assert before is not None
    trained = context.result(TrainResult, GENERALIST)
    assert (trained.adapter, trained.before, trained.start) == (own, before.id, before.sha256)
    assert 0 < trained.chosen <= 2
    starts = starts_for(context, "count_high", training_settings(context.settings), None)
    assert [start.adapter for start in starts][-2:] == [own, before.id], "what it lacks may begin from either"
    shown = ids(store, f"id FROM trajectories WHERE group_id = '{HINT}' AND environment <> '{solved.name}'")
    tried = ids(store, f"id FROM trajectories WHERE adapter_id = '{before.id}' AND purpose = 'routing'")
    practice = ids(store, f"id FROM trajectories WHERE adapter_id = '{own}' AND purpose = 'training'")
    assert shown
    assert len(tried) == SIZE
    assert len(practice) >= 8
    for name, figures in result.items():
        charged = Account(store, name).charged()
        assert {charged.get(i) for i in tried} == {"routing"}, name
        assert {charged.get(i) for i in practice} == {"training"}, name
        assert {charged.get(i) for i in shown} == {"calibration"}, name
        assert figures.episodes == sum(n for what, n in figures.purposes.items() if what != TEST) <= 500
    assert result["generalist-grpo"].purposes["training"] > len(practice), "and trains behind it"
    assert result["generalist-grpo"].rollouts[0].count > len(practice)
    charged, stored = charged_and_stored([context])
    assert charged == stored
    close_round(context)


def test_plain_grpo_begins_from_what_has_learnt_the_solutions(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "budget": 60,
        "target": solved.name,
        "train": TRAIN | {"demonstrations": 4, "recall_rate": 0.01},
    }
    run = seed_run(settings_folder, tiny_model, **given)
    result = run_all(run, settings_folder / "seed.json", ["demonstrations", "demonstrations-grpo"]).methods
    cloned, trained = result["demonstrations"], result["demonstrations-grpo"]
    assert cloned.notes[0] == trained.notes[0] == "learnt 8 reference solutions"
    assert trained.notes[1].startswith("trained for ")
    assert (cloned.episodes, trained.purposes["diagnosis"]) == (0, SIZE)
    assert trained.purposes["training"] >= 8
    assert trained.seconds > cloned.seconds > 0, "what it begins from took its time, too"
    own_store = next(store for store in stores_of(run) if store is not run.context.store)
    rows = {row.id: row for row in own_store.rows(AdapterRow, round_id=run.context.round.id)}
    start, own = (rows[adapter_id(run.context.round.id, name)] for name in result)
    assert len(rows) == 2, "the solutions are learnt once for both"
    assert own.config["start"] == start.sha256 != own.sha256
    assert (start.config["learning_rate"], own.config["learning_rate"]) == (0.01, TRAIN["learning_rate"])
    # Where nothing is learnt, the start answers.
    other = seed_run(settings_folder / "other", tiny_model, **given)
    monkeypatch.setattr("tasks.methods.trained.train_on", raising(TrainingError("no group was informative")))
    left = run_all(other, settings_folder / "other.json", ["demonstrations", "demonstrations-grpo"]).methods
    assert left["demonstrations-grpo"].outcomes == left["demonstrations"].outcomes
    assert "the adapter that it begins from answers: no group" in left["demonstrations-grpo"].notes[1]
    for opened in (run, other):
        close_round(opened.context)


def test_what_a_kill_left_goes_on_to_the_same_figures(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run = seed_run(settings_folder / "undisturbed", tiny_model)
    whole = run_all(whole_run, settings_folder / "whole.json", KILLED)
    stored = [ids(store, "id FROM trajectories") for store in stores_of(whole_run)]
    close_round(whole_run.context)
    path, admit, deaths = settings_folder / "killed.json", Account.admit, 0
    for last in (2, 4, 7, 11, 16, 24, 30, 1000):
        calls = iter(range(1, 10_000))

        def dying(self: Account, given: Any, purpose: str, last: int = last, calls: Any = calls) -> None:
            admit(self, given, purpose)
            if next(calls) == last:
                raise Died

        monkeypatch.setattr(Account, "admit", dying)
        run = seed_run(settings_folder / "killed", tiny_model)
        try:
            result = run_all(run, path, KILLED)
            break
        except Died:
            deaths += 1
        finally:
            again = [len(ids(store, "id FROM trajectories")) for store in stores_of(run)]
            close_round(run.context)
    assert deaths >= 4
    assert without_seconds(result) == without_seconds(whole)
    assert again == [len(part) for part in stored], "nothing was played that the undisturbed run did not play"
