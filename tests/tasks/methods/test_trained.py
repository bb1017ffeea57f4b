"""Trainings on the target itself: what their checkpoints are chosen on, and what no result is booked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from db import AdapterRow, SpendRow, TrainingStepRow
from environments.contract import Action, TargetTask
from environments.targets.shop.target import target as shop
from environments.wrapping import WrappedEnvironment
from errors import TrainingError, TrainingMemoryError, Untrainable
from models.training.records import TrainingSettings
from tasks.methods import iterated as iterated_file
from tasks.methods import trained as trained_file
from tasks.methods.run import measured
from tasks.methods.seed.answers import Answer
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import DIAGNOSIS, close_round, diagnose, pay
from tasks.methods.trained import TargetPractice, grpo_cloned, grpo_target
from tasks.round.adapters import adapter_id
from tasks.synthesis.calibration import CHOOSING_SEED
from tasks.synthesis.choosing import fresh_scenarios
from tests.tasks.methods.letters_target import SIZE, made, target
from tests.tasks.methods.seeds_made import seed_run, without_prefect


def test_a_checkpoint_is_chosen_on_tasks_of_several_families_where_the_target_lists_them_one_by_one() -> None:
    listed = [
        made("validation", 8 * n + k, family) for n, family in enumerate(("low", "high", "both")) for k in range(8)
    ]
    practice = TargetPractice("grpo-target", target, target.tasks("diagnosis"), listed, dense=True)
    for number in (1, 2):
        own, retention = fresh_scenarios(practice, 8, number)
        assert len({task.id for task in own}) == 8
        assert {task.family for task in own} == {"low", "high", "both"}
        assert retention == []
    everything = [practice.own_scenario(CHOOSING_SEED + i).id for i in range(len(listed))]
    assert sorted(everything) == sorted(task.id for task in listed), "none is left out"
    again = TargetPractice("grpo-target", target, target.tasks("diagnosis"), listed, dense=True)
    assert [again.own_scenario(CHOOSING_SEED + i).id for i in range(len(listed))] == everything, "a resumed one, too"


def test_the_reference_of_a_task_is_replayed_once_for_all_of_its_episodes() -> None:
    resets: list[str] = []

    class Noting(WrappedEnvironment):
        def reset(self, task: TargetTask):  # type: ignore[no-untyped-def]
            resets.append(task.id)
            return super().reset(task)

    given = shop()
    make = given.environment
    given.environment = lambda: Noting(make())  # type: ignore[method-assign, assignment, return-value]
    task = given.tasks("diagnosis")[0]
    practice = TargetPractice("grpo-target", given, [task], [task], dense=True)
    for _ in range(4):
        environment = practice.environment()
        environment.reset(task)
        environment.step(Action(content="Bye."))
        assert environment.score().reward < 1
    assert len(resets) == 4 + 1


def test_an_outage_and_a_small_gpu_are_no_result_of_a_method(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_prefect(monkeypatch)
    run = seed_run(settings_folder, tiny_model)
    outage = TrainingError("every group lost an episode to the infrastructure")
    outage.transient = True
    try:
        account = pay(run.context, "grpo-target", run.episodes, ())
        for problem in (TrainingMemoryError("a training ran out of the GPU's memory"), outage):
            raising(monkeypatch, problem)
            with pytest.raises(type(problem)):
                grpo_target(run, run.context, account)
        raising(monkeypatch, TrainingError("the loss of step 3 is not finite"))
        assert grpo_target(run, run.context, account).notes == (
            "nothing was learnt, so the bare base answers: the loss of step 3 is not finite",
        )
    finally:
        close_round(run.context)


def test_a_baseline_is_not_judged_as_an_environment_of_trace_is(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_prefect(monkeypatch)
    run, given = seed_run(settings_folder, tiny_model), list[Any]()

    def train_adapter(*args: Any, **_: Any) -> NoReturn:
        given.extend(args)
        raise TrainingError("enough")

    monkeypatch.setattr("tasks.synthesis.learning.training.train_adapter", train_adapter)
    try:
        grpo_target(run, run.context, pay(run.context, "grpo-target", run.episodes, ()))
        (settings,) = (x for x in given if isinstance(x, TrainingSettings))
        row = run.context.store.row(AdapterRow, id=adapter_id(run.context.round.id, "grpo-target"))
        assert row is not None
        assert (settings.judged, row.config["judged"]) == (False, False)
    finally:
        close_round(run.context)


def test_mixed_pays_what_language_models_cost_to_make_its_environments(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it looked free beside the methods that have TRACE's account."""
    without_prefect(monkeypatch)
    run = seed_run(settings_folder, tiny_model)
    found: dict[str, Any] = {
        "beginning_of": lambda context, capability: None,
        "stored_environment": lambda *given: None,
        "Mixture": lambda parts: None,
        "_trained": lambda run, context, *given: Answer(context),
    }
    for name, stand_in in found.items():
        monkeypatch.setattr(trained_file, name, stand_in)
    monkeypatch.setattr(type(run.context), "result", lambda *given: SimpleNamespace(selected=["say_low_letters"]))
    monkeypatch.setattr(type(run.context), "found", lambda *given: SimpleNamespace(accepted=True))
    for number, stage in enumerate(("contrast", "synthesize", "user", "synthesize")):
        row = SpendRow(id=f"spent{number}", round_id=run.context.round.id, stage=stage, model="m", dollars=0.5)
        run.context.store.put([row])
    try:
        answer = trained_file.mixed(run, run.context, account := pay(run.context, "mixed", run.episodes, ()))
        assert answer.shared_dollars == 1.5
        monkeypatch.setattr("tasks.methods.run.play_answer", lambda *given: [])
        assert measured(answer, account).dollars == 1.5
    finally:
        close_round(run.context)


def test_a_kill_amid_the_choice_of_a_checkpoint_leaves_what_was_trained(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget pays for two steps and the choice. What that has taken when the process dies is not missed: else the
    base answered. What is counted by each step is what was played by then, no episode of the choice among it."""
    without_prefect(monkeypatch)
    run, admit, choosing = seed_run(settings_folder, tiny_model, budget=50), Account.admit, list[str]()

    def dying(self: Account, ids: Sequence[str], purpose: str) -> None:
        admit(self, ids, purpose)
        choosing.extend(ids if purpose == "evaluation" else ())
        if len(choosing) == 12:
            raise KeyboardInterrupt

    try:
        diagnose(run)
        with monkeypatch.context() as patched:
            patched.setattr(Account, "admit", dying)
            with pytest.raises(KeyboardInterrupt):
                grpo_target(run, run.context, pay(run.context, "grpo-target", run.episodes, (DIAGNOSIS,)))
        answer = grpo_target(run, run.context, pay(run.context, "grpo-target", run.episodes, (DIAGNOSIS,)))
        rows = run.context.store.rows(TrainingStepRow, adapter_id=adapter_id(run.context.round.id, "grpo-target"))
        assert answer.notes[0].startswith("trained for 2 steps (steps)")
        assert [point.episodes for point in answer.checkpoints] == [SIZE + row.metrics["played"] for row in rows]
    finally:
        close_round(run.context)


def test_expert_iteration_draws_anew_in_every_iteration(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_prefect(monkeypatch)
    run, played = seed_run(settings_folder, tiny_model), list[tuple[str, int]]()
    trials = run.context.settings.rollout.trials
    diagnosis = [(task.id, trial) for task in run.context.tasks("diagnosis") for trial in range(trials)]

    def noted(ground: Any, episodes: Any, what: str) -> list[str]:
        played.extend((e.task.id, e.trial) for e in episodes)
        return []

    def iterated(context: Any, name: str, counts: list[int], play: Any) -> int:
        for number, samples in enumerate(counts, 1):
            play(number, samples, None)
        return len(counts)

    monkeypatch.setattr(type(run.context.engine), "play", lambda self, *given: noted(*given))
    monkeypatch.setattr(iterated_file, "_iterated", iterated)
    monkeypatch.setattr(type(run.context), "result", lambda self, kind: SimpleNamespace(trajectories=diagnosis))
    try:
        account: Any = SimpleNamespace(episodes=30 * len(diagnosis))
        assert iterated_file.expert_iteration(run, run.context, account) > 2  # type: ignore[operator]
        assert len({*diagnosis, *played}) == len(diagnosis) + len(played)
    finally:
        monkeypatch.undo()
        close_round(run.context)


TORN = Untrainable("the loss is nan at step 3")


@pytest.mark.parametrize("method", [iterated_file.cloning, grpo_cloned])
def test_reference_solutions_that_cannot_be_learnt_leave_the_base(
    monkeypatch: pytest.MonkeyPatch, method: Callable[..., Answer]
) -> None:
    outage = Untrainable("a server is gone")
    outage.transient = True
    context: Any = SimpleNamespace()
    for problem in (TORN, outage):

        def cloned(context: Any, problem: TrainingError = problem) -> NoReturn:
            raise problem

        monkeypatch.setattr("tasks.methods.iterated.cloned_adapter", cloned)
        monkeypatch.setattr("tasks.methods.trained.cloned_adapter", cloned)
        if problem is outage:
            with pytest.raises(Untrainable, match="gone"):
                method(None, context, None)
        else:
            answer = method(None, context, None)
            assert answer == Answer(
                context, notes=("nothing was learnt, so the bare base answers: the loss is nan at step 3",)
            )


def iterating(monkeypatch: pytest.MonkeyPatch, solved: Sequence[str]) -> Any:
    """A context in which iterations learn from what is `solved` so far."""
    monkeypatch.setattr(iterated_file, "training_settings", lambda settings: None)
    monkeypatch.setattr(iterated_file, "picked", lambda *given: solved)
    monkeypatch.setattr(iterated_file, "behind_known_prompts", lambda context, rows: rows)
    monkeypatch.setattr(iterated_file, "success_of", lambda *given: 0.1)
    monkeypatch.setattr(iterated_file, "one_adapter", lambda context, name, identity: Answer(context, lineup=identity))
    return SimpleNamespace(
        settings=None,
        store=SimpleNamespace(trajectory_frame=lambda *given, **more: None),
        registry=SimpleNamespace(end_run=lambda run: None),
        result=lambda kind: SimpleNamespace(trajectories=[]),
    )


@pytest.mark.parametrize(("fails", "whose"), [(1, "the bare base"), (2, "the adapter of iteration 1")])
def test_an_iteration_that_cannot_be_learnt_from_leaves_what_the_one_before_has_made(
    monkeypatch: pytest.MonkeyPatch, fails: int, whose: str
) -> None:
    def learn(context: Any, name: str, *given: Any) -> Any:
        if name.endswith(str(fails)):
            raise TORN
        return SimpleNamespace(adapter=SimpleNamespace(id=name), run="")

    monkeypatch.setattr(iterated_file, "learn", learn)
    context = iterating(monkeypatch, ["a success"])
    played: list[int] = []
    answer = iterated_file._iterated(context, "it", [8, 8, 8], lambda n, count, latest: [str(played.append(n))])
    assert played == [*range(1, fails + 1)]
    assert answer.notes[-1] == f"nothing was learnt, so {whose} answers: the loss is nan at step 3"
    assert answer.lineup == (Answer(context).lineup if fails == 1 else "it-1")


def test_an_iteration_without_a_success_does_not_end_what_the_budget_pays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that solves next to nothing solves something in the third."""
    there: list[str] = []
    learnt = SimpleNamespace(adapter=SimpleNamespace(id="third"), run="")
    monkeypatch.setattr(iterated_file, "learn", lambda *given: learnt)
    context = iterating(monkeypatch, there)
    played: list[tuple[int, Any]] = []

    def play(number: int, count: int, latest: Any) -> list[str]:
        played.append((number, latest))
        there.extend(["a success"] if number == 3 else [])
        return [str(number)]

    assert iterated_file._iterated(context, "it", [8, 8], play).notes[-1].startswith("nothing has succeeded")
    assert played == [(1, None), (2, None)]
    assert iterated_file._iterated(context, "it", [8, 8, 8], play).lineup == "third"


def raising(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    """Every training ends with the problem."""

    def train_on(*given: Any) -> NoReturn:
        raise problem

    monkeypatch.setattr("tasks.methods.trained.train_on", train_on)
