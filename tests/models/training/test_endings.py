"""How a training ends where nothing is left to learn, what it keeps, and what it may begin from."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from environments.contract import Action, Observation, Score, TargetTask
from errors import AdapterError, StoreError, TrainingError
from models.adapters.files import CONFIG, WEIGHTS, adapter_digest
from models.episodes import Trajectory
from models.training.actors import LocalActor
from models.training.checkpoints import COMPLETE, keep_weights, last_whole_checkpoint
from models.training.grpo import TrainingResult, train_adapter
from models.training.records import GroupFigures, StepRecord, TrainingSettings
from models.training.rollouts import (
    SEEDS,
    SPARE_SEEDS,
    OutOfEpisodes,
    Rollouts,
    dealt_out,
    scenario_seed,
)
from settings import load_settings
from tasks.synthesis.learning.training import training_settings
from tests.models.training.test_grpo import SMALL, Half, Source, Toy


def step_of(task: TargetTask) -> int:
    """The step of a training with seed 0 that a scenario belongs to."""
    return task.seed // SEEDS


class Scripted(Toy):
    """In steps from `since` on every episode has the same score; before, rewards differ and nothing succeeds."""

    since = 1
    then = Score(1.0, True)

    def reset(self, task: TargetTask) -> Observation:
        self.task = task
        return super().reset(task)

    def score(self) -> Score:
        if step_of(self.task) >= self.since:
            return self.then
        return Score((sum(map(ord, self.said)) % 7) / 70, False)


class Mastered(Scripted):
    since = 0


class MasteredLater(Scripted):
    pass


class Stuck(Scripted):
    then = Score(0.04, False)


class Misled(Scripted):
    then = Score(0.5, False)


class HalfSolved(Scripted):
    """Own scenarios (even seeds) fail and the others succeed, each group being equal."""

    since = 0

    def score(self) -> Score:
        return Score(float(self.task.seed % 2), bool(self.task.seed % 2))


class Gone(Toy):
    def step(self, action: Action) -> Observation:
        raise ConnectionError("the world is gone")


class Mixture(Source):
    """Every other scenario is there for retention."""

    def own(self, task: TargetTask) -> bool:
        return task.seed % 2 == 0


class Rare(Source):
    """The capability's own scenarios are among the spare seeds alone."""

    def own(self, task: TargetTask) -> bool:
        return task.seed % SEEDS >= SPARE_SEEDS + 3


def trained(model: Any, source: Source, output: Path, settings: TrainingSettings = SMALL, **given: Any) -> Any:
    policy, renderer = model
    return train_adapter(source, LocalActor(policy), renderer, settings, output, lambda _: None, **given)


def kept(result: TrainingResult, step: int) -> dict[str, torch.Tensor]:
    return load_file(result.weights[step] / WEIGHTS)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_base_that_masters_the_environment_is_a_good_end(tiny_model: Any, tmp_path: Path) -> None:
    result = trained(tiny_model, Source(Mastered), tmp_path)
    assert (result.ending, result.verdict, result.records, result.last) == ("mastered", "", (), 0)
    changed = [n for n, t in kept(result, 0).items() if "lora_B" in n and t.abs().max() > 0]
    assert changed == []  # the starting weights: an adapter that changes nothing


def test_a_training_that_is_not_judged_says_that_nothing_is_left_to_learn(tiny_model: Any, tmp_path: Path) -> None:
    """Its reward has parted from success, as the unmade step says."""
    result = trained(tiny_model, Source(Misled), tmp_path, replace(SMALL, steps=4, judged=False))
    assert (result.ending.partition(":")[0], result.verdict) == ("nothing more to learn", "")


@pytest.mark.parametrize(
    ("kind", "ending", "verdict"),
    [
        (MasteredLater, "mastered", ""),
        (Stuck, "nothing more to learn: no informative group in 3 collections of 2 groups at step 1: 6 groups had", ""),
        (Misled, "misspecified", "reward-misspecified"),
    ],
)
def test_what_was_learnt_before_nothing_was_left_is_the_result(
    tiny_model: Any, tmp_path: Path, kind: type[Toy], ending: str, verdict: str
) -> None:
    result = trained(tiny_model, Source(kind), tmp_path, replace(SMALL, steps=4))
    assert result.ending.startswith(ending)
    assert result.verdict.startswith(verdict)
    assert bool(result.verdict) == bool(verdict)
    assert (result.last, len(result.records)) == (1, 1)
    assert not same(kept(result, 0), kept(result, 1))
    # Who asks again is told the same, and nothing is played: an environment that is gone could not be.
    assert trained(tiny_model, Source(Gone), tmp_path, replace(SMALL, steps=4)) == replace(
        result, environment_seconds=0.0
    )
    assert tiny_model[0].adapters == ()


def test_nothing_to_learn_at_all_is_an_error_that_says_what_to_do(tiny_model: Any, tmp_path: Path) -> None:
    """Also where retention scenarios succeed: mastered is what is solved on the capability's own."""
    with pytest.raises(TrainingError, match=r"at step 0: 6 groups had equal rewards; make the reward denser") as raised:
        trained(tiny_model, Mixture(HalfSolved), tmp_path)
    assert not raised.value.transient
    assert last_whole_checkpoint(tmp_path) is None


def test_a_step_whose_every_group_was_lost_may_be_tried_again(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"every group lost an episode .* ConnectionError: the world is gone"
    ) as raised:
        trained(tiny_model, Source(Gone), tmp_path)
    assert raised.value.transient


def test_figures_are_of_all_groups_that_were_collected_each_once(tiny_model: Any, tmp_path: Path) -> None:
    """Seeds from 2 on (the second collection) are all successes: they teach nothing, and they count."""

    class Second(Toy):
        def reset(self, task: TargetTask) -> Observation:
            self.task = task
            return super().reset(task)

        def score(self) -> Score:
            if self.task.seed == 0:  # the one informative group
                return super().score()
            return Score(1.0, True) if self.task.seed >= 2 else Score(0.25, False)

    one = replace(SMALL, steps=1)
    record = trained(tiny_model, Mixture(Second), tmp_path, one).records[0]
    own, other = ([g for g in record.groups if g.own is side] for side in (True, False))
    # Seeds 0 and 1, then 2 and 4 (one group is missing in the second and in the third collection).
    assert [(g.episodes, g.successes) for g in other] == [(4, 0)]
    assert len(own) == 3
    assert [g.successes for g in own[1:]] == [4, 4]
    assert record.metrics["dropped_groups"] == 3
    assert record.metrics["own_episodes"] == 12
    assert record.metrics["retention_success"] == 0.0
    assert record.success == (own[0].successes + 8) / 12


def test_every_step_has_a_scenario_of_the_capabilitys_own(tiny_model: Any) -> None:
    policy, renderer = tiny_model
    rollouts = Rollouts(Rare(), LocalActor(policy), renderer, SMALL, lambda step, trajectories: None)
    for step in range(3):
        first, second = rollouts.scenarios(step, 0, 2), rollouts.scenarios(step, 1, 2)
        assert [t.seed % SEEDS for t in first] == [0, SPARE_SEEDS + 3]
        assert [t.seed % SEEDS for t in second] == [2, 3]


def test_no_scenario_is_drawn_twice_in_sixty_rounds_of_a_home() -> None:
    """Whatever the settings of each round: here they change from round to round."""
    seen = set()
    count = 0
    for seed in (0, 11):
        for number in range(1, 61):
            s = training_settings(load_settings(profile=("laptop", "gpu")[number % 2], seed=seed), number)
            places = [*range(s.groups * s.collections), *range(SPARE_SEEDS, SPARE_SEEDS + 100)]
            drawn = [scenario_seed(s.seed, step, place) for step in range(s.steps) for place in places]
            seen.update(drawn)
            count += len(drawn)
    assert len(seen) == count > 50_000
    assert min(seen) >= 0  # the others are for calibration, and for choosing a checkpoint


def test_the_weights_of_every_step_are_kept_and_a_cut_off_step_is_done_again(tiny_model: Any, tmp_path: Path) -> None:
    settings = replace(SMALL, steps=3)
    whole = trained(tiny_model, Source(), tmp_path / "whole", settings)
    assert sorted(whole.weights) == [0, 1, 2, 3]
    assert len({adapter_digest(folder) for folder in whole.weights.values()}) == 4
    assert not (tmp_path / "whole" / "checkpoint-1").exists()  # the optimizer's state of the last two alone
    assert whole.ending == "steps"
    # Killed between the weights of step 2 and the mark that its checkpoint is whole, amid writing those of step 3.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "checkpoint-2" / COMPLETE).unlink()
    shutil.rmtree(tmp_path / "cut" / "checkpoint-3")
    shutil.rmtree(tmp_path / "cut" / "weights" / "step-3")
    (tmp_path / "cut" / "weights" / ".step-3").mkdir()
    assert last_whole_checkpoint(tmp_path / "cut") is None
    again = trained(tiny_model, Source(), tmp_path / "cut", settings)
    assert [r.step for r in again.records] == [1, 2, 3]
    for step in range(4):
        assert same(kept(whole, step), kept(again, step))


@pytest.mark.parametrize("cut_off", ["adapter_model.safetensors", "optimizer.pt"])
def test_a_disk_that_fills_up_amid_a_checkpoint(tiny_model: Any, tmp_path: Path, cut_off: str) -> None:
    """No file may grow to the size that this one has: the step is done again, once there is room."""
    settings, (policy, renderer) = replace(SMALL, steps=2), tiny_model
    whole = trained(tiny_model, Source(), tmp_path / "whole", settings)
    size = (tmp_path / "whole" / "checkpoint-2" / cut_off).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(record: StepRecord) -> None:
        if record.step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))

    try:
        with pytest.raises(StoreError, match=r"free space on its disk, then the same command goes on"):
            train_adapter(Source(), LocalActor(policy), renderer, settings, tmp_path / "full", filling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = last_whole_checkpoint(tmp_path / "full")
    assert left is not None
    assert left[0].name == "checkpoint-1"
    again = trained(tiny_model, Source(), tmp_path / "full", settings)
    assert [r.step for r in again.records] == [1, 2]
    assert same(kept(whole, 2), kept(again, 2))


def test_checkpoints_that_were_cut_off_are_passed_over(tmp_path: Path) -> None:
    assert last_whole_checkpoint(tmp_path) is None
    for step in (1, 2, 9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    records = [StepRecord(1, 0.1, 0.0, 0.0, 0.0, 1.0, (GroupFigures(True, 4, 2, 0.5),))]
    for step in (1, 9):
        (tmp_path / f"checkpoint-{step}" / COMPLETE).write_text(json.dumps([asdict(r) for r in records]))
    assert last_whole_checkpoint(tmp_path) == (tmp_path / "checkpoint-9", records)


def test_weights_that_are_gone_are_missed(tiny_model: Any, tmp_path: Path) -> None:
    result = trained(tiny_model, Source(), tmp_path, replace(SMALL, steps=1))
    shutil.rmtree(result.weights[1])
    with pytest.raises(AdapterError, match=r"weights of step 1 is gone; remove .* and train again"):
        trained(tiny_model, Source(), tmp_path, replace(SMALL, steps=1))


def test_training_goes_on_from_a_champions_weights(tiny_model: Any, tmp_path: Path) -> None:
    champion = trained(tiny_model, Source(), tmp_path / "champion", replace(SMALL, learning_rate=0.05))
    before = adapter_digest(champion.folder)
    second = trained(tiny_model, Source(), tmp_path / "second", replace(SMALL, steps=1, seed=9), start=champion.folder)
    assert same(kept(second, 0), kept(champion, 2))
    assert not same(kept(second, 0), kept(second, 1))
    first = second.records[0]
    assert first.kl > 1e-4  # to the base, not to the champion
    assert first.logprob_gap < 1e-3  # and what samples has the champion's weights too
    # A training that goes on has its own weights, and the start is not looked at.
    again = trained(tiny_model, Source(), tmp_path / "second", replace(SMALL, seed=9), start=tmp_path / "gone")
    assert same(kept(again, 1), kept(second, 1))
    assert again.last == 2
    assert adapter_digest(champion.folder) == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rank": 8}, r"has r = 4, this training 8: .* give train.rank the adapter's value"),
        ({"alpha": 16}, r"has lora_alpha = 8, this training 16"),
        ({"upper_layers": 1}, r"has layers_to_transform = \[1, 2\], this training \[2\]"),
        ({"upper_layers": None}, r"has layers_to_transform = \[1, 2\], this training None"),
    ],
)
def test_a_start_of_another_shape_is_refused_before_anything_is_played(
    tiny_model: Any, tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    champion = trained(tiny_model, Source(), tmp_path / "champion", replace(SMALL, steps=1))
    with pytest.raises(AdapterError, match=words):
        trained(tiny_model, Source(Gone), tmp_path / "second", replace(SMALL, **other), start=champion.folder)
    assert tiny_model[0].adapters == ()
    assert not any("lora" in name for name, _ in tiny_model[0].model.named_parameters())


def test_a_start_of_another_base_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    champion = trained(tiny_model, Source(), tmp_path / "champion", replace(SMALL, steps=1))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shutil.copyfile(champion.folder / CONFIG, foreign / CONFIG)
    weights = {name: torch.zeros(*(2 * n for n in t.shape)) for name, t in kept(champion, 1).items()}
    save_file(weights, foreign / WEIGHTS)
    with pytest.raises(AdapterError, match=r"of shape \(\d+, \d+\), the model has .*another base"):
        trained(tiny_model, Source(Gone), tmp_path / "second", SMALL, start=foreign)


def test_what_is_kept_replaces_what_was_cut_off(tiny_model: Any, tmp_path: Path) -> None:
    result = trained(tiny_model, Source(), tmp_path, replace(SMALL, steps=1))
    (tmp_path / "weights" / ".step-1").mkdir()
    digest = adapter_digest(result.weights[1])
    keep_weights(tmp_path, 1, result.weights[0])
    assert adapter_digest(tmp_path / "weights" / "step-1") == adapter_digest(result.weights[0]) != digest
    assert names(tmp_path / "weights") == ["step-0", "step-1"]


def names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_training_stops_where_its_episodes_end_and_goes_on_to_the_same_end(tiny_model: Any, tmp_path: Path) -> None:
    """Two groups of four a step: 20 episodes pay for two steps, with or without a process that died between."""
    policy, renderer = tiny_model
    settings = replace(SMALL, steps=5, collections=1, most_episodes=20)
    played: list[str] = []

    def count(step: int, trajectories: list[Trajectory]) -> None:
        played.extend(t.episode.key for t in trajectories)

    def train(folder: str, most: int | None) -> TrainingResult:
        given = replace(settings, most_episodes=most)
        return train_adapter(
            Source(), LocalActor(policy), renderer, given, tmp_path / folder, lambda _: None, on_trajectories=count
        )

    whole = train("whole", 20)
    assert (whole.ending, whole.verdict, whole.last, len(played)) == ("budget", "", 2, 16)
    assert [r.metrics["played"] for r in whole.records] == [8, 16]
    train("cut", 8)
    (tmp_path / "cut" / "ended.json").unlink()
    again = train("cut", 20)
    assert (again.ending, again.last, len(played)) == ("budget", 2, 32)
    assert adapter_digest(again.folder) == adapter_digest(whole.folder)
    assert train("whole", 20).ending == "budget", "and it stays ended"
    nothing = train("poor", 7)
    assert (nothing.ending, nothing.last, len(played)) == ("budget", 0, 32)


def test_a_redraw_that_cannot_be_paid_leaves_the_step_what_it_has(tiny_model: Any, tmp_path: Path) -> None:
    """One of two groups is informative: the second collection would replace the other."""
    policy, renderer = tiny_model
    settings = replace(SMALL, steps=1, collections=2, most_episodes=11)
    rollouts = Rollouts(Source(Half), LocalActor(policy), renderer, settings, lambda *given: None)
    rollouts.adapter = None  # type: ignore[assignment]  # the base itself
    assert len(rollouts.collect(0)) == 8
    assert (rollouts.played, rollouts.dropped) == (8, 1)
    with pytest.raises(OutOfEpisodes, match="8 of at most 11"):
        rollouts.collect(1)


def test_advantages_that_are_dealt_out_keep_their_values_and_lose_their_rollouts() -> None:
    advantages_GK = torch.arange(24.0).view(3, 8)
    dealt_GK = dealt_out(advantages_GK, 5)
    assert torch.equal(dealt_GK.sort(dim=1).values, advantages_GK), "each group keeps its own"
    assert not torch.equal(dealt_GK, advantages_GK)
    assert torch.equal(dealt_GK, dealt_out(advantages_GK, 5))
    assert not torch.equal(dealt_GK, dealt_out(advantages_GK, 6))


def test_a_shuffled_training_learns_from_dealt_out_advantages(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    made: dict[Any, Any] = {}
    for shuffled in (False, True):
        steps: list[StepRecord] = []
        settings = replace(SMALL, steps=1, shuffled=shuffled)
        output = tmp_path / str(shuffled)
        made[shuffled] = train_adapter(Source(), LocalActor(policy), renderer, settings, output, steps.append).folder
        assert steps[0].reward == pytest.approx(made.setdefault("reward", steps[0].reward)), "figures are true"
    assert adapter_digest(made[True]) != adapter_digest(made[False])
