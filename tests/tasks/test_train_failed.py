"""Adapters that cannot be trained, or not to the end: they end alone, and the round goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from db import GENERALIST, AdapterRow, AdapterState, CapabilityRow, EnvironmentRow, EnvironmentState, row_id
from environments.contract import Action, Observation, TargetTask
from environments.sandbox.workers import CallKilled, ModuleError, WorkerDied, WorkerNotStarted
from errors import AdapterError, EnvironmentFault, EpisodesLost, Untrainable
from models.adapters.files import WEIGHTS
from models.adapters.fingerprint import Fingerprint, moves
from models.adapters.loading import load_folder
from tasks import register as register_file
from tasks import train as stage_file
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id
from tasks.round.context import Context
from tasks.round.results import StartFigures, SynthesizeResult
from tasks.synthesis.calibration import FRESH_SEED, seed_offset
from tasks.synthesis.choosing import Choice
from tasks.synthesis.learning import course as course_file
from tasks.synthesis.learning import training as training_file
from tasks.synthesis.starting import start_config
from tests.tasks.test_train import CAPABILITY, Made, World, opened, trained


@pytest.fixture
def context(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    yield from opened(settings_folder / "home", tiny_model, monkeypatch)


def torn(folder: Path) -> None:
    """Weights that are no numbers any more."""
    found = load_file(folder / WEIGHTS)
    save_file({name: torch.full_like(weight, float("nan")) for name, weight in found.items()}, folder / WEIGHTS)


@pytest.mark.parametrize("steps", [(3,), (1, 2, 3)])
def test_a_checkpoint_that_has_come_apart_is_left_out(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: tuple[int, ...]
) -> None:
    pick, choose = course_file.pick, training_file.choose
    compared: list[list[int]] = []

    def second(frames: Any, own: Any) -> Choice:
        compared.append(sorted(frames))
        return replace(pick(frames, own), step=2)

    def choosing(context: Context, identity: str, environment: Any, result: Any, warm: bool) -> Choice:
        for step in steps:
            torn(result.weights[step])
        return choose(context, identity, environment, result, warm)

    monkeypatch.setattr(course_file, "pick", second)
    monkeypatch.setattr(training_file, "choose", choosing)
    if len(steps) == 3:
        result = stage_file.train.do(context, CAPABILITY)
        assert result.verdict.startswith(
            "training-failed: the adapter after step 1 gives log-probabilities that are not"
        )
        assert (result.steps, result.ending, result.chosen, result.sha256) == (3, "failed", 0, "")
        assert result.run == f"{context.round.id}-{CAPABILITY}"
        assert not result.goes_on
        assert not result.goes_back
        row = context.store.row(AdapterRow, id=result.adapter)
        assert row is not None
        assert (row.state, row.path) == (AdapterState.FAILED, "")
        monkeypatch.setattr(stage_file, "train_on", lambda *given: pytest.fail("it is trained once more"))
        again = stage_file.train._work(context, CAPABILITY)  # a process that died before the stage's end
        assert again.verdict == result.verdict
        assert again.steps == 3
    else:
        result = trained(context)
        assert (result.chosen, [c.step for c in result.choice]) == (2, [0, 1, 2])
        assert compared == [[0, 1, 2]]
    assert f"step 3 of {CAPABILITY} is left out" in caplog.text
    assert context.policy.adapters == ()


@pytest.mark.parametrize("name", [GENERALIST, BEFORE_PRACTICE])
def test_a_generalist_that_cannot_be_trained_ends_alone(
    context: Context, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    identity = adapter_id(context.round.id, name)
    row = AdapterRow(id=identity, round_id=context.round.id, base="b", base_revision="", state=AdapterState.TRAINING)

    of = {"round_id": context.round.id, "name": GENERALIST, "analyst": "checks"}
    about = CapabilityRow(id=row_id(context.round.id, GENERALIST), **of)
    environment = EnvironmentRow(id="made", round_id=context.round.id, capability_id=about.id, version=2,
                                 kind="generators", state=EnvironmentState.ACCEPTED)  # fmt: skip
    context.store.put([about])
    context.store.put([environment])

    def learn(context: Context, environment: str, wanted: Any, asked: str) -> None:
        context.store.put([row])
        raise Untrainable("the loss is nan at step 0")

    made = SynthesizeResult(accepted=True, environment="made", versions=2)
    monkeypatch.setattr(stage_file, "learn_generalist", learn)
    monkeypatch.setattr(context, "result", lambda kind, name: made)
    result = stage_file.train.do(context, GENERALIST)
    assert (result.unused, result.ending) == ("training-failed: the loss is nan at step 0", "failed")
    assert result.run == f"{context.round.id}-{name}", "the run that its learning has begun"


def test_what_a_failed_training_began_from_is_told(context: Context) -> None:
    none: dict[str, Any] = {"retention": None, "reward": 0.5, "success": 0.5, "own": 0.5}
    compared = [StartFigures(capability="", adapter="", chosen=False, **none)]
    compared.append(StartFigures(capability="ask_it", adapter="first", chosen=True, **none))
    identity = adapter_id(context.round.id, CAPABILITY)
    row = AdapterRow(
        id=identity, round_id=context.round.id, base="b", base_revision="", state=AdapterState.TRAINING,
        config={"rank": 4} | start_config("abc", compared, ["low"]),
    )  # fmt: skip
    context.store.put([row])
    stored = context.store.row(AdapterRow, id=identity)
    assert stored is not None
    result = stage_file._failed(context, CAPABILITY, 1, stored, "the loss is nan")
    assert (result.start, result.starts, result.keeps) == ("abc", compared, ["low"])
    assert result.began_from(CAPABILITY) == "the adapter for ask_it"


def test_why_a_failed_training_did_not_begin_from_its_champion_is_told(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise Untrainable("the loss is nan at step 1")

    monkeypatch.setattr(stage_file, "champion_start", lambda *_: (None, "its champion has rank 8, train.rank is 4"))
    monkeypatch.setattr(training_file, "train_adapter", fails)
    result = stage_file.train._work(context, CAPABILITY)
    assert (result.ending, result.began) == ("failed", "its champion has rank 8, train.rank is 4")
    again = stage_file.train._work(context, CAPABILITY)  # a process that died before the stage's end
    assert again.began == result.began


def silent(folder: Path) -> None:
    """Weights that add nothing."""
    found = load_file(folder / WEIGHTS)
    save_file({name: torch.zeros_like(weight) for name, weight in found.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(("spoil", "said"), [(torn, "not finite"), (silent, "is not live")])
def test_an_adapter_that_could_not_be_registered_is_no_end_of_its_round(
    context: Context, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], said: str
) -> None:
    """Of a training with one checkpoint nothing is played before."""

    def choosing(context: Context, identity: str, environment: Any, result: Any, warm: bool) -> Choice:
        spoil(result.weights[result.last])
        return Choice(result.last, ())

    if spoil is torn:  # vLLM probes what it loads
        monkeypatch.setattr(context.policy, "load_adapter", lambda *_: pytest.fail("a server would be blamed for it"))
    monkeypatch.setattr(training_file, "choose", choosing)
    result = stage_file.train.do(context, CAPABILITY)
    assert result.verdict.startswith("training-failed: ")
    assert said in result.verdict
    row = context.store.row(AdapterRow, id=result.adapter)
    assert row is not None
    assert row.state == AdapterState.FAILED
    assert context.policy.adapters == ()


@pytest.mark.parametrize("carry", [False, True])
def test_a_module_that_gives_no_scenarios_any_more_ends_its_own_adapter(
    context: Context, monkeypatch: pytest.MonkeyPatch, carry: bool
) -> None:
    """Amid a training, and when what it may begin from is compared, where nothing of the adapter is stored yet."""

    class Spoilt(Made):
        def scenario(self, seed: int) -> TargetTask:
            raise ModuleError("no scenario came of 20 random numbers")

    def compared(*given: Any) -> Any:
        return Spoilt().scenario(0)

    train = context.settings.train.model_copy(update={"carry": carry})
    monkeypatch.setattr(context, "settings", context.settings.model_copy(update={"train": train}))
    monkeypatch.setattr(stage_file, "stored_environment", lambda *given: Spoilt())
    monkeypatch.setattr(stage_file, "starts_of", compared)
    result = stage_file.train.do(context, CAPABILITY)
    assert result.verdict == "training-failed: no scenario came of 20 random numbers"
    row = context.store.row(AdapterRow, id=result.adapter)
    assert row is not None
    assert (row.state, row.environment_id, row.config["rank"]) == (AdapterState.FAILED, "made", 4)


KILLED = CallKilled("the call passed its deadline of 3 s of processor time")


@pytest.mark.parametrize("problem", [ModuleError("KeyError: 'slot'"), KILLED])
def test_a_module_that_raises_in_what_is_played_ends_its_own_adapter(
    context: Context, monkeypatch: pytest.MonkeyPatch, problem: ModuleError
) -> None:
    """Tried again it would raise again, or take as long again, and the round would never end."""

    class Raising(World):
        def step(self, action: Action) -> Observation:
            raise problem

    class Spoilt(Made):
        def environment(self) -> World:
            return Raising()

    monkeypatch.setattr(stage_file, "stored_environment", lambda *given: Spoilt())
    result = stage_file.train.do(context, CAPABILITY)
    assert result.verdict.startswith("training-failed: no informative group in ")
    assert str(problem) in result.verdict


class Losing(World):
    """Training goes well in it, and every scenario that weights are compared on ends with an error."""

    problem: Exception = KILLED

    def reset(self, task: TargetTask) -> Observation:
        self.compared = task.id.startswith("own-")
        return super().reset(task)

    def step(self, action: Action) -> Observation:
        if self.compared:
            raise self.problem
        return super().step(action)


def test_a_module_that_loses_every_episode_of_a_comparison_ends_its_own_adapter(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(Made):
        def environment(self) -> World:
            return Losing()

    monkeypatch.setattr(stage_file, "stored_environment", lambda *given: Spoilt())
    result = stage_file.train.do(context, CAPABILITY)
    assert result.verdict == (
        "training-failed: the written module ended all 6 episodes that were to show what step 0 is worth with an "
        "error; the first: the call passed its deadline of 3 s of processor time"
    )
    assert (result.steps, result.goes_on) == (3, False)
    row = context.store.row(AdapterRow, id=result.adapter)
    assert row is not None
    assert (row.state, row.config["module-at-fault"]) == (AdapterState.FAILED, True)


@pytest.mark.parametrize("problem", [WorkerNotStarted("Too many open files"), EnvironmentFault("the shop is closed")])
def test_what_the_machine_or_a_target_loses_of_a_comparison_is_no_fault_of_a_module(
    context: Context, monkeypatch: pytest.MonkeyPatch, problem: EnvironmentFault
) -> None:
    class Spoilt(Made):
        def environment(self) -> World:
            return Losing()

    monkeypatch.setattr(stage_file, "stored_environment", lambda *given: Spoilt())
    monkeypatch.setattr(Losing, "problem", problem)
    with pytest.raises(EnvironmentFault, match="what step 0 is worth were lost to errors"):
        stage_file.train.do(context, CAPABILITY)


@pytest.mark.parametrize("problem", [WorkerDied("no worker starts"), EnvironmentFault("all episodes were lost")])
def test_what_may_not_be_the_modules_doing_is_raised(
    context: Context, monkeypatch: pytest.MonkeyPatch, problem: EnvironmentFault
) -> None:
    def choosing(*given: Any, **named: Any) -> Choice:
        raise problem

    monkeypatch.setattr(training_file, "choose", choosing)
    with pytest.raises(type(problem), match=str(problem)):
        stage_file.train.do(context, CAPABILITY)


def test_a_server_that_does_not_take_an_adapter_ends_the_round(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that have come apart are found before it is asked, so what it says then is about itself."""

    def load(*_: Any) -> None:
        raise AdapterError("http://one:8000 dropped adapter 'a'")

    monkeypatch.setattr(training_file, "choose", lambda *given, **_: Choice(given[3].last, ()))
    monkeypatch.setattr(context.policy, "load_adapter", load)
    with pytest.raises(AdapterError, match="dropped"):
        stage_file.train.do(context, CAPABILITY)


def test_a_side_of_which_every_fresh_episode_was_lost_is_played_again_and_no_defect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = measuring(monkeypatch, [("sandbox", "no worker could be started: too many files"), ("environment", "x")])
    with pytest.raises(EpisodesLost, match="all 2 episodes of base on fresh seeds of say_it were lost to errors"):
        register_file.register._work(context, CAPABILITY)


def test_a_module_that_loses_every_fresh_episode_ends_its_own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    context = measuring(monkeypatch, [("sandbox", "KeyError: 'slot'"), ("sandbox", "TypeError: x")])
    result = register_file.register._work(context, CAPABILITY)
    assert result.skipped == (
        "training-failed: the written module ended all 2 episodes that were to show what base does on fresh seeds with "
        "an error; the first: KeyError: 'slot'"
    )
    assert not result.goes_on
    (kind, identity, state), more = context.store.set_state.call_args
    assert (kind, identity, state) == (AdapterRow, "a", AdapterState.FAILED)
    assert (more["config"]["rank"], more["config"]["module-at-fault"]) == (4, True)
    context.registry.register.assert_not_called()
    # A process died between that and the end of the stage.
    context.store.row.return_value = replace(context.store.row.return_value, state=state, **more)
    assert register_file.register._work(context, CAPABILITY).skipped == result.skipped


def test_a_module_without_fresh_scenarios_ends_its_own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoilt(Made):
        def own_scenario(self, seed: int) -> TargetTask:
            raise ModuleError("no scenario came of 20 random numbers")

    context = measuring(monkeypatch, [])
    monkeypatch.setattr(register_file, "stored_environment", lambda *_: Spoilt())
    result = register_file.register._work(context, CAPABILITY)
    assert result.skipped == "training-failed: no scenario came of 20 random numbers"


def measuring(monkeypatch: pytest.MonkeyPatch, lost: list[tuple[str, str]]) -> Mock:
    """A round whose episodes on two fresh seeds were all lost: boundary and error of each."""
    context = Mock()
    context.settings.evaluation.fresh, context.round.number = 2, 1
    context.engine.play.return_value = ["one", "two"]
    for name in ("own_adapter", "load_trained", "proof_of"):
        monkeypatch.setattr(register_file, name, Mock())
    monkeypatch.setattr(register_file, "champion_of", lambda *_: None)
    monkeypatch.setattr(register_file, "stored_environment", lambda *_: Made())
    row = AdapterRow(id="a", round_id="r", base="b", base_revision="", state=AdapterState.TRAINED, config={"rank": 4})
    context.store.row.return_value, first = row, FRESH_SEED + seed_offset(1)
    frame = pd.DataFrame(
        [(f"own-{first + i}", "own", float("nan"), None, *how) for i, how in enumerate(lost)],
        columns=["task", "family", "success", "reward", "error_boundary", "error"],
    )
    monkeypatch.setattr(register_file, "outcomes", lambda *_, **__: frame)
    return context


def test_weights_are_probed_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """When their training ends: not again where the process died before the stage's end, nor to be registered."""
    probe, probed = course_file.fingerprint_on, list[str]()

    def counted(policy: Any, given: Any, name: str) -> Fingerprint:
        probed.append(name)
        return probe(policy, given, name)

    for file in (course_file, register_file):
        monkeypatch.setattr(file, "fingerprint_on", counted)
    result = stage_file.train._work(context, CAPABILITY)
    course_file.check_alive(context, CAPABILITY, result.adapter)
    row = context.store.row(AdapterRow, id=result.adapter)
    assert row is not None
    proof = register_file.proof_of(context, row, "not loaded")
    assert (len(probed), moves(proof), proof.base != proof.adapted) == (1, True, True)
    # Other weights under the same id, as of a training that was done again.
    name = load_folder(context.policy, context.files.fetch(row.path), CAPABILITY, "x", row.sha256)
    register_file.proof_of(context, replace(row, sha256="other"), name)
    assert probed[1:] == [name]
