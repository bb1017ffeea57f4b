"""The stage that trains: the best checkpoint becomes the adapter, also when the process dies in between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import text

from db import (
    GENERALIST,
    AdapterRow,
    AdapterState,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    TrainingStepRow,
    TrajectoryRow,
    row_id,
)
from environments.contract import Message, Observation, Prompt, Score, TargetTask
from errors import StageHeld
from models.adapters.files import adapter_digest
from models.local.base import BaseModel
from settings import load_settings
from tasks import train as stage_file
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.results import SynthesizeResult, TrainResult
from tasks.round.rollouts import round_seed
from tasks.round.stage import forget, open_context, stage
from tasks.synthesis.calibration import measure
from tasks.synthesis.choosing import Choice
from tasks.synthesis.learning import course as course_file
from tasks.synthesis.learning import training as training_file
from tests.adapters_made import make_adapter
from tests.models.training.test_grpo import Toy

CAPABILITY = "say_it"
TRAIN = {"steps": 3, "groups": 2, "group_size": 4, "rank": 4, "alpha": 8, "upper_layers": 2, "temperature": 1.0}


def trained(context: Context, start: Path | None = None) -> TrainResult:
    """The capability's adapter, trained from the weights in `start` or from zero."""
    return training_file.train_on(context, stage_file.course_of(context, CAPABILITY), start)


class Died(BaseException):
    """What stands for SIGKILL: nothing of the project catches it."""


class World(Toy):
    def reset(self, task: TargetTask) -> Observation:
        self.own = task.family == "own"
        return super().reset(task)

    def score(self) -> Score:
        said = sum(map(ord, self.said))
        return Score((said % 7) / 7, said % 7 > 3) if self.own else Score(float(said % 2), bool(said % 2))


@dataclass(frozen=True)
class Spec:
    id: str = "toy"
    capability: str = CAPABILITY
    retention_share: float = 0.5


class Made:
    """An environment as the stage `synthesize` leaves one."""

    spec = Spec()

    def scenario(self, seed: int) -> TargetTask:
        return TargetTask(f"toy-{seed}", "training", ("own", "other")[seed % 2], seed)

    def own_scenario(self, seed: int) -> TargetTask:
        return TargetTask(f"own-{seed}", "training", "own", seed)

    def own(self, task: TargetTask) -> bool:
        return task.family == "own"

    def environment(self) -> World:
        return World()


class Quiet:
    """Stands for MLflow's run of a training; its own tests are in `tests/models/adapters`."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.client = Mock()
        self.client.get_run.return_value.data.params = {}
        self.client.search_runs.return_value, self.experiment_id = [], "1"

    def start_run(self, key: str, tags: dict[str, str], name: str = "", parent: str = "") -> str:
        return key

    def end_run(self, run: str, failed: bool = False, stopped: bool = False) -> None: ...

    def log_steps(self, run: str, steps: dict[int, dict[str, float]]) -> None:
        for step, metrics in steps.items():
            self.steps.setdefault(step, {}).update(metrics)


@pytest.fixture
def context(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    yield from opened(settings_folder / "home", tiny_model, monkeypatch)


def opened(home: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    policy, renderer = model
    settings = load_settings(
        profile="smoke",
        home=home,
        train=TRAIN | {"candidates": 3, "choosing": 6},
        rollout={"max_tokens": 6, "temperature": 0.5},
    )
    context = open_context(settings)
    context.__dict__.update(
        base=BaseModel(policy, renderer, policy.identity()),
        registry=Quiet(),
        probe=renderer.start(Prompt.of(Toy()), [Message("user", "seed 1")]),
    )
    monkeypatch.setattr(stage_file, "stored_environment", lambda *given: Made())

    given: Any = {"round_id": context.round.id}
    capability = CapabilityRow(id=row_id(context.round.id, CAPABILITY), name=CAPABILITY, analyst="checks", **given)
    made = EnvironmentRow(
        id="made", capability_id=capability.id, version=1, kind="generators", state=EnvironmentState.DRAFT, **given
    )
    context.store.put([capability])
    context.store.put([made])

    @stage("synthesize")
    def synthesized(context: Context, capability: str) -> SynthesizeResult:
        return SynthesizeResult(accepted=True, environment=made.id)

    synthesized.do(context, CAPABILITY)
    yield context
    forget(context.round.id)


def played(context: Context, purpose: str) -> list[TrajectoryRow]:
    return list(context.store.trajectories(context.round.id, purpose=purpose))


def test_the_checkpoint_that_was_chosen_becomes_the_adapter(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = course_file.pick
    seen: list[Choice] = []

    def second(frames: Any, own: Any) -> Choice:
        seen.append(pick(frames, own))
        return replace(seen[0], step=2)

    monkeypatch.setattr(course_file, "pick", second)
    result = stage_file.train.do(context, CAPABILITY)
    assert (result.steps, result.ending, result.verdict, result.chosen) == (3, "steps", "", 2)
    assert result.goes_on
    output = context.folder / "training" / CAPABILITY
    row = context.store.row(AdapterRow, id=adapter_id(context.round.id, CAPABILITY))
    assert row is not None
    assert row.sha256 == result.sha256 == adapter_digest(output / "weights" / "step-2")
    assert adapter_digest(context.settings.folder / row.path) == result.sha256
    # Start and candidates met the same scenarios, none of them one of training's, at the temperature of evaluation.
    assert [c.step for c in result.choice] == [c.step for c in seen[0].figures] == [0, 1, 2, 3]
    chosen, trained = played(context, "evaluation"), played(context, "training")
    assert len(chosen) == 4 * (6 + 4)
    assert len({r.task_id for r in chosen}) == 10
    assert len({r.policy_id for r in chosen}) == 4
    assert not {r.task_id for r in chosen} & {r.task_id for r in trained}
    assert {r.adapter_id for r in chosen} == {None, row.id}  # what a training from zero begins from is the base
    # What is reported: own and retention apart.
    steps = sorted(context.store.rows(TrainingStepRow, adapter_id=row.id), key=lambda r: r.step)
    for step in steps:
        mine = [r for r in trained if r.family == "own" and r.id in ids_of(context, step.step - 1, trained)]
        assert step.metrics["own_episodes"] == len(mine)
        assert step.success == pytest.approx(sum(bool(r.success) for r in mine) / len(mine))
        assert context.registry.steps[step.step]["train/own_success"] == step.success
    assert context.registry.steps[0]["choice/own_success"] == result.choice[0].success
    assert context.policy.adapters == ()


def ids_of(context: Context, step: int, rows: list[TrajectoryRow]) -> set[str]:
    """Ids of the episodes of a step of training."""
    identity = adapter_id(context.round.id, CAPABILITY)
    names = [f"{step}/{c}/{g}/{k}" for c in range(2) for g in range(2) for k in range(4)]
    return {row_id(identity, name) for name in names}


# Where a process dies: at which call of what, and how many episodes it has played to choose by then.
DEATHS = (("step_row", 2, 0), ("play_checkpoint", 3, 20), ("TrainResult", 1, 40))


def test_processes_that_died_are_followed_by_one_with_the_same_result(
    context: Context, settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in training, the next amid choosing, one before the result is stored."""
    other = next(opened(settings_folder / "undisturbed", tiny_model, monkeypatch))
    whole = trained(other)
    assert len(whole.choice) == 4
    before: set[str] = set()
    for name, last, chosen_on in DEATHS:
        with pytest.MonkeyPatch.context() as patch:
            file = course_file if name == "play_checkpoint" else training_file
            patch.setattr(file, name, dying(getattr(file, name), last))
            with pytest.raises(Died):
                trained(context)
        assert len(played(context, "evaluation")) == chosen_on
        assert before <= {r.id for r in played(context, "training")}
        before = {r.id for r in played(context, "training")}
    result = trained(context)
    own = {"choosing_seconds": 0.0, "adapter": "", "run": ""}  # what each round has to itself
    assert result.model_copy(update=own) == whole.model_copy(update=own)
    for purpose in ("training", "evaluation"):
        assert len(played(context, purpose)) == len(played(other, purpose))
    forget(other.round.id)


def dying(real: Any, last: int) -> Any:
    """`real`, which ends the process at its `last` call."""
    calls: list[int] = []

    def dies(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == last:
            raise Died
        return real(*given, **named)

    return dies


@pytest.mark.parametrize(("late", "steps"), [("step_row", 1), ("choose", 3)])
def test_a_process_that_was_suspended_leaves_the_adapter_of_the_one_that_took_over(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, steps: int
) -> None:
    """It comes back amid a training whose stage another process has done, and stored, to the end."""
    stored, identity = context.store, adapter_id(context.round.id, CAPABILITY)
    other = make_adapter(context.base.policy.model, tmp_path / "other", layers=(1, 2))
    final, digest = context.folder / "training" / CAPABILITY / "final", adapter_digest(other)
    real = getattr(training_file, late)

    def suspended(*given: Any, **named: Any) -> Any:
        ledger = stored.stage(context.round.id, f"train:{CAPABILITY}")
        if not ledger.finished:
            with stored.transaction() as connection:
                connection.execute(text("UPDATE stages SET lease_until = '2020-01-01 00:00:00.000000'"))
            assert ledger.claim("another")
            shutil.copytree(other, final)
            stored.set_state(AdapterRow, identity, AdapterState.TRAINED, sha256=digest, path=str(final))
            made = TrainResult(adapter=identity, sha256=digest, steps=3, run="", ending="steps", chosen=3)
            ledger.finish(made.model_dump(mode="json"))
        return real(*given, **named)

    monkeypatch.setattr(training_file, late, suspended)
    with pytest.raises(StageHeld, match=f"'train:{CAPABILITY}' was taken over by another"):
        stage_file.train.do(context, CAPABILITY)
    assert adapter_digest(final) == digest
    assert len(stored.rows(TrainingStepRow, adapter_id=identity)) == steps
    assert context.claimed is None
    context.still_ours()  # between stages there is nothing to lose


def test_a_training_from_a_champion_is_compared_with_the_champion(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(context)
    output, champion = context.folder / "training" / CAPABILITY, context.folder / "champion"
    (output / "final").rename(champion)
    output.rename(context.folder / "earlier")
    digests: list[str] = []
    real = course_file.play_checkpoint

    def watched(engine: Any, ground: Any, tasks: Any, seed: int, adapter: str | None) -> Any:
        digests.append(context.policy.identity(adapter).adapter)
        return real(engine, ground, tasks, seed, adapter)

    monkeypatch.setattr(course_file, "play_checkpoint", watched)
    second = trained(context, champion)
    assert second.start == first.sha256 == adapter_digest(champion)
    weights = output / "weights"
    assert digests == [first.sha256, *(adapter_digest(weights / f"step-{c.step}") for c in second.choice[1:])]


def test_what_has_no_alternative_is_not_played(context: Context) -> None:
    one = context.settings.model_copy(update={"train": context.settings.train.model_copy(update={"candidates": 1})})
    context.settings = one
    result = trained(context)
    assert (result.chosen, result.choice) == (3, [])
    assert played(context, "evaluation") == []


def test_why_an_adapter_is_not_used() -> None:
    made = TrainResult(adapter="a", sha256="s", steps=3, run="r", ending="steps", chosen=2)
    assert made.goes_on
    assert made.model_copy(update={"verdict": "reward-misspecified: x"}).unused == "reward-misspecified: x"
    nothing = made.model_copy(update={"steps": 0, "chosen": 0, "ending": "mastered"})
    assert not nothing.goes_on
    assert nothing.unused.startswith("mastered")
    assert "worse on fresh seeds" in made.model_copy(update={"chosen": 0}).unused


def test_a_champion_is_calibrated_on_scenarios_of_its_round(context: Context, tmp_path: Path) -> None:
    folder = make_adapter(context.base.policy.model, tmp_path / "champion", layers=(1, 2))
    context.policy.load_adapter(CAPABILITY, adapter_digest(folder), folder)
    base = measure(context.engine, context.settings, Made())  # type: ignore[arg-type]
    champion = measure(context.engine, context.settings, Made(), CAPABILITY, 3)  # type: ignore[arg-type]
    assert base.policy_id == context.policy.identity().id
    assert champion.policy_id == context.policy.identity(CAPABILITY).id != base.policy_id
    rows = played(context, "calibration")
    tasks = {who: {r.task_id for r in rows if r.policy_id == who} for who in (base.policy_id, champion.policy_id)}
    assert tasks[base.policy_id] == {"own--1", "own--2"}
    assert tasks[champion.policy_id] == {"own--200001", "own--200002"}
    assert {r.seed for r in rows} == {0, 2_000_006}


def test_every_version_of_an_environment_has_a_run_of_its_own(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second version's figures would be left out, as those of a step that is there already."""
    keys: list[str] = []

    def begun(self: Context, key: str, *given: Any, **more: Any) -> str:
        keys.append(key)
        raise Died

    monkeypatch.setattr(Context, "part_run", begun)
    first = stage_file.course_of(context, CAPABILITY)
    second = replace(first, folder=first.folder.with_name(f"{CAPABILITY}-2"), adapter=f"{first.adapter}-2")
    for course in (first, second):
        with pytest.raises(Died):
            training_file.train_on(context, course)
    assert keys == [f"{context.round.id}-{CAPABILITY}", f"{context.round.id}-{CAPABILITY}-2"]


def test_the_generalist_of_each_round_has_a_start_and_an_order_of_its_own(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    made = SynthesizeResult(accepted=True, environment="made")
    monkeypatch.setattr(stage_file, "learn_generalist", lambda context, made, wanted, name: seeds.append(wanted.seed))
    monkeypatch.setattr(context, "result", lambda kind, name: made)
    monkeypatch.setattr(context, "round", replace(context.round, number=3))
    assert stage_file.train.do(context, GENERALIST).ending == "nothing"
    assert seeds == [round_seed(context.settings.seed, 3)] != [round_seed(context.settings.seed, 1)]
    assert round_seed(context.settings.seed, 1) == context.settings.seed, "that of the first is the home's"
