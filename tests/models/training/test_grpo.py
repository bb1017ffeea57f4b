"""Training: exact log-probabilities and gradients, checkpoints that can be trusted, and stops that say why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file

from environments.contract import Action, Message, Observation, Score, TargetTask
from errors import TrainingError
from models.adapters.deltas import folder_deltas, lora_deltas
from models.adapters.files import CONFIG, export_adapter
from models.episodes import Trajectory
from models.training.actors import LocalActor
from models.training.checkpoints import last_whole_checkpoint
from models.training.forward import StepPrefix, token_logprobs
from models.training.grpo import train_adapter
from models.training.learner import FusedLearner, make_learner
from models.training.lora import lora_config
from models.training.records import StepRecord, TrainingSettings
from models.training.rollouts import group_advantages
from models.training.trl_trainer import EpisodeGRPO
from tests.tokenizers_trained import plain_twin, random_ids

SMALL = TrainingSettings(
    steps=2, groups=2, group_size=4, rank=4, alpha=8, upper_layers=2, temperature=1.0, max_tokens=6, micro_batch=4
)


class Toy:
    """Rewards short even-numbered characters: something a random model does now and then."""

    tools: Sequence[Any] = ()
    instructions = "Answer."
    examples: Sequence[Message] = ()
    max_steps = 2
    uniform = False

    def reset(self, task: TargetTask) -> Observation:
        self.said = ""
        return Observation((Message("user", f"seed {task.seed}"),))

    def step(self, action: Action) -> Observation:
        self.said += action.content + action.malformed
        return Observation((Message("user", "and?"),), done=len(self.said) > 8)

    def score(self) -> Score:
        reward = 0.5 if self.uniform else (sum(map(ord, self.said)) % 7) / 7
        return Score(reward, reward > 0.8)

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None:
        pass


class Uniform(Toy):
    uniform = True


class Half(Toy):
    """Every other scenario gives equal rewards."""

    def reset(self, task: TargetTask) -> Observation:
        self.uniform = task.seed % 2 == 1
        return super().reset(task)


class Lossy(Toy):
    """The third scenario of a step loses an episode to the infrastructure."""

    def step(self, action: Action) -> Observation:
        if self.seed == 2 and action.content + action.malformed:
            raise ConnectionError("the world is gone")
        return super().step(action)

    def reset(self, task: TargetTask) -> Observation:
        self.seed = task.seed
        return super().reset(task)


class Mixed(Toy):
    """Scenarios of two kinds behind different instructions, as retention scenarios may stand."""

    def reset(self, task: TargetTask) -> Observation:
        self.instructions = "Answer in one word." if task.seed % 2 else "Answer."
        return super().reset(task)


class Source:
    """A scenario source over `Toy`."""

    def __init__(self, kind: type[Toy] = Toy) -> None:
        self.kind = kind

    def scenario(self, seed: int) -> TargetTask:
        return TargetTask(f"toy-{seed}", "training", "toy", seed)

    def own(self, task: TargetTask) -> bool:
        return True

    def environment(self) -> Toy:
        return self.kind()


def lora(policy: Any) -> Any:
    """A live adapter with random weights on a plain model."""
    torch.manual_seed(3)
    peft = get_peft_model(policy.model, lora_config(SMALL, policy.model))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return peft


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("shared", "batches"), [(0, 1), (9, 1), (9, 2)])
def test_token_logprobs_equal_a_plain_pass_in_value_and_gradient(
    tiny_model: Any, shared: int, batches: int, fused: bool
) -> None:
    """Also when the rows come in micro-batches after a prefix that is passed through once; through transformers and
    PEFT, and through the layers' own pass."""
    policy, _ = tiny_model
    twin = plain_twin(policy)
    peft = lora(policy)
    torch.manual_seed(3)
    plain = get_peft_model(twin, lora_config(SMALL, twin))
    plain.load_state_dict(peft.state_dict())
    rows = [random_ids(50, 9)[:shared] + random_ids(seed, 8 + 3 * seed) for seed in range(4)]
    wanted = [[p for p in range(shared + 2, len(row)) if p % 2] for row in rows]
    causal, got = peft.get_base_model(), []
    if fused:
        causal = make_learner(causal, policy.decoder)
        assert isinstance(causal, FusedLearner)
        assert causal.frozen == 1  # SMALL adapts the upper two of three layers
    prefix = StepPrefix(causal, rows[0][:shared]) if batches > 1 else None
    for first in range(0, 4, 4 // batches):
        part = slice(first, first + 4 // batches)
        scored = token_logprobs(causal, rows[part], shared, wanted[part], 0.7, prefix)
        sum((chosen * torch.arange(1, len(chosen) + 1)).sum() for chosen, _ in scored).backward()
        got += scored
    if prefix is not None:
        prefix.backward()
    truth = torch.zeros(())
    for row, places, (chosen, entropy) in zip(rows, wanted, got, strict=True):
        logprobs = torch.log_softmax(plain(torch.tensor([row])).logits[0].float() / 0.7, -1)
        expected = torch.stack([logprobs[p - 1, row[p]] for p in places])
        assert torch.allclose(chosen, expected, atol=1e-4)
        before = logprobs[[p - 1 for p in places]]
        assert torch.allclose(entropy, -(before.exp() * before).sum(-1), atol=1e-4)
        truth = truth + (expected * torch.arange(1, len(places) + 1)).sum()
    truth.backward()
    expected_gradients = {n: p.grad for n, p in plain.named_parameters() if "lora_" in n}
    compared = 0
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, expected_gradients[name], atol=1e-3, rtol=1e-3), name
            compared += int(parameter.grad.abs().sum() > 0)
    assert compared > 10


def test_a_disabled_adapter_leaves_the_base(tiny_model: Any) -> None:
    """KL to the base is measured so."""
    policy, _ = tiny_model
    row, twin = random_ids(3, 12), plain_twin(policy)
    peft = lora(policy)
    learner = make_learner(peft.get_base_model(), policy.decoder)
    with torch.no_grad():
        expected = torch.log_softmax(twin(torch.tensor([row])).logits[0].float(), -1)[range(3, 11), row[4:]]
        with peft.disable_adapter():
            ((base, _),) = token_logprobs(learner, [row], 2, [range(4, 12)], 1.0)
        ((adapted, _),) = token_logprobs(learner, [row], 2, [range(4, 12)], 1.0)
    assert torch.allclose(base, expected, atol=1e-4)
    assert (adapted - base).abs().max() > 1e-2
    # Both passes: three layers, prefix and the nine tokens after it; what lies below the adapters of the prefix once.
    assert learner.work.trained_forward == 2 * 3 * 11 - 2
    assert learner.work.trained_backward == learner.work.seen_backward == 0
    assert learner.work.trained_heads == 16


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def exported(source: Path, folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Digest and deltas of a trained adapter, as the registry keeps it."""
    export_adapter(source, folder)
    digest, deltas = folder_deltas(folder)
    return digest, {name: delta.whole() for name, delta in deltas.items()}


def test_training_changes_the_adapter_and_only_that_and_resumes(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    before = weights(policy)
    steps: list[StepRecord] = []
    played: list[tuple[int, str]] = []

    def on_trajectories(step: int, trajectories: list[Trajectory]) -> None:
        played.extend((step, t.episode.key) for t in trajectories)

    one = train_adapter(
        Source(),
        LocalActor(policy),
        renderer,
        replace(SMALL, steps=1),
        tmp_path,
        steps.append,
        on_trajectories=on_trajectories,
    )
    assert [r.step for r in one.records] == [1]
    modules = json.loads((one.folder / CONFIG).read_text())["target_modules"]
    assert modules == sorted(modules)  # not in the order of this process's hashes: the digest is of the weights
    digest, deltas = exported(one.folder, tmp_path / "one")
    assert max(float(d.abs().max()) for d in deltas.values()) > 0
    assert all(".2." in name or ".1." in name for name in deltas)  # the upper two of three layers
    two = train_adapter(
        Source(), LocalActor(policy), renderer, SMALL, tmp_path, steps.append, on_trajectories=on_trajectories
    )
    assert [r.step for r in steps] == [1, 2]  # the second call went on, it did not repeat
    assert [r.step for r in two.records] == [1, 2]
    assert {step for step, _ in played} == {0, 1}
    assert len(set(played)) == len(played)
    second, _ = exported(two.folder, tmp_path / "two")
    assert second != digest
    for step in steps:
        assert step.logprob_gap < 1e-3  # what the trainer computes is what the sampler drew from
        assert math.isfinite(step.loss)
    assert steps[0].kl == pytest.approx(0.0, abs=1e-5)  # the adapter begins as the base
    three = train_adapter(Source(), LocalActor(policy), renderer, SMALL, tmp_path, steps.append)
    assert len(steps) == 2  # nothing was owed
    assert exported(three.folder, tmp_path / "three")[0] == second
    after = weights(policy)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert policy.adapters == ()
    assert not lora_deltas(policy.model)


def test_a_rate_that_falls_moves_less_in_the_last_step(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    moved = {}
    for schedule in ("constant", "linear"):
        settings, output = replace(SMALL, schedule=schedule), tmp_path / schedule
        train_adapter(Source(), LocalActor(policy), renderer, settings, output, lambda _: None)
        first, last = (load_file(output / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (1, 2))
        moved[schedule] = sum(float((last[name] - first[name]).abs().sum()) for name in last)
    assert 0 < moved["linear"] < 0.75 * moved["constant"]


def test_scenarios_with_other_instructions_are_scored_after_their_own(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    steps: list[StepRecord] = []
    train_adapter(Source(Mixed), LocalActor(policy), renderer, replace(SMALL, steps=1), tmp_path, steps.append)
    assert steps[0].logprob_gap < 1e-3


def test_work_that_is_left_out_changes_no_gradient(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix passed through once, and rows without an advantage left out, against every row with its own prefix."""
    policy, renderer = tiny_model
    settings = replace(SMALL, steps=1, groups=4, collections=1)
    found = []
    for name in ("quick", "plain"):
        records: list[StepRecord] = []
        if name == "plain":
            monkeypatch.setattr("models.training.trl_trainer.NO_ADVANTAGE", -1.0)
            monkeypatch.setattr("models.training.trl_trainer.StepPrefix", lambda learner, ids: None)
        result = train_adapter(Source(Half), LocalActor(policy), renderer, settings, tmp_path / name, records.append)
        found.append((records[0], exported(result.folder, tmp_path / f"{name}.exported")[1]))
    (quick, deltas), (plain, expected) = found
    assert quick.metrics["dropped_groups"] == 2
    assert quick.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-4) != 0
    assert quick.loss == pytest.approx(plain.loss, rel=1e-4, abs=1e-7)
    for name, delta in deltas.items():
        assert torch.allclose(delta, expected[name], atol=1e-2 * float(expected[name].abs().max())), name


def test_the_advantage_is_the_distance_from_the_groups_mean_in_its_deviations() -> None:
    rewards_GK = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.8]])
    advantages_GK = group_advantages(rewards_GK)
    assert advantages_GK.shape == rewards_GK.shape
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages_GK[0].tolist() == pytest.approx([-half, half, -half, half])
    assert advantages_GK[1].abs().max() == 0  # equal rewards say nothing
    assert advantages_GK[2].tolist() == pytest.approx([-0.49988, -0.49988, -0.49988, 1.49963], abs=1e-4)
    assert torch.allclose(group_advantages(rewards_GK + 3), advantages_GK, atol=1e-5)  # the baseline is the group's


@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_have_no_advantage_whatever_they_and_their_number_are(scaled: bool) -> None:
    for k in (3, 5, 7, 8, 12, 24):
        assert not group_advantages(torch.linspace(0, 1, 100)[:, None].repeat(1, k), scaled).any()
        assert group_advantages(torch.tensor([[0.3] * (k - 1) + [0.31]]), scaled).all()


def test_advantages_that_are_not_scaled_are_the_distance_alone() -> None:
    rewards_GK = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.2]])
    assert group_advantages(rewards_GK, scaled=False).tolist() == [
        [-0.5, 0.5, -0.5, 0.5],
        pytest.approx([-0.05, -0.05, -0.05, 0.15]),
    ]


@pytest.mark.parametrize(("changed", "same"), [({}, True), ({"scaled": False}, False), ({"delta": 1.35}, False)])
def test_scale_and_bound_reach_the_step(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], same: bool
) -> None:
    """`delta` acts where trainer and sampler disagree: here the sampler is said to have found every token rarer."""
    policy, renderer = tiny_model
    generated = EpisodeGRPO._generate_and_score_completions

    def rarer(self: Any, inputs: Any) -> Any:
        output = generated(self, inputs)
        output["old_per_token_logps"] = output["old_per_token_logps"] - 0.5  # ratio 1.65
        return output

    monkeypatch.setattr(EpisodeGRPO, "_generate_and_score_completions", rarer)
    steps: list[StepRecord] = []
    for name, settings in (("plain", SMALL), ("changed", replace(SMALL, **changed))):
        train_adapter(Source(), LocalActor(policy), renderer, replace(settings, steps=1), tmp_path / name, steps.append)
    assert (steps[0].loss == pytest.approx(steps[1].loss, rel=1e-5)) is same


def test_the_trainer_learns_from_the_advantage_of_that_one_function(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, renderer = tiny_model
    settings = replace(SMALL, steps=1)
    steps: list[StepRecord] = []
    train_adapter(Source(), LocalActor(policy), renderer, settings, tmp_path / "as it is", steps.append)
    monkeypatch.setattr(
        "models.training.rollouts.group_advantages",
        lambda rewards_GK, scaled: -2 * group_advantages(rewards_GK, scaled),
    )
    train_adapter(Source(), LocalActor(policy), renderer, settings, tmp_path / "turned round", steps.append)
    assert steps[1].loss == pytest.approx(-2 * steps[0].loss, rel=1e-4)
    assert steps[1].metrics["grad_norm"] == pytest.approx(2 * steps[0].metrics["grad_norm"], rel=1e-3)


def test_a_group_that_was_lost_is_not_replaced_by_another_counted_twice(tiny_model: Any, tmp_path: Path) -> None:
    """Two groups and a lost one teach what the two teach alone."""
    policy, renderer = tiny_model
    three = replace(SMALL, steps=1, groups=3, collections=1)
    steps: list[StepRecord] = []
    train_adapter(Source(Lossy), LocalActor(policy), renderer, three, tmp_path / "lossy", steps.append)
    train_adapter(Source(), LocalActor(policy), renderer, replace(three, groups=2), tmp_path / "two", steps.append)
    lossy, two = steps
    assert (lossy.metrics["missing_groups"], two.metrics["missing_groups"]) == (1, 0)
    assert lossy.metrics["dropped_groups"] == two.metrics["dropped_groups"] == 0
    assert (lossy.reward, lossy.success) == (pytest.approx(two.reward), pytest.approx(two.success))
    assert lossy.metrics["grad_norm"] == pytest.approx(two.metrics["grad_norm"], rel=1e-3) != 0
    assert lossy.loss == pytest.approx(two.loss, rel=1e-3, abs=1e-6)


def test_equal_rewards_teach_nothing_and_say_so(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    with pytest.raises(TrainingError, match="no informative group in 3 collections"):
        train_adapter(Source(Uniform), LocalActor(policy), renderer, SMALL, tmp_path, lambda _: None)
    assert policy.adapters == ()
    assert last_whole_checkpoint(tmp_path) is None


def test_a_loss_that_is_not_finite_ends_the_training(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    before = weights(policy)
    with pytest.raises(TrainingError, match="step"):
        train_adapter(
            Source(), LocalActor(policy), renderer, replace(SMALL, learning_rate=1e30), tmp_path, lambda _: None
        )
    after = weights(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert policy.adapters == ()


@pytest.mark.model
def test_one_step_on_the_embedded_model(embedded_model: Any, tmp_path: Path) -> None:
    """Sampler and trainer agree on the real model too."""
    policy, renderer = embedded_model
    steps: list[StepRecord] = []
    settings = replace(SMALL, steps=1, upper_layers=2)
    train_adapter(Source(), LocalActor(policy), renderer, settings, tmp_path, steps.append)
    assert steps[0].logprob_gap < (1e-3 if policy.identity().dtype == "float32" else 7e-2)
