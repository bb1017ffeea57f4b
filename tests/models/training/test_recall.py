"""Recall: an adapter learns from conversations that succeeded, by the gradient of their likelihood, and resumes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file

from errors import TrainingError
from models.adapters.files import WEIGHTS
from models.renderer import Conversation
from models.training.actors import LocalActor
from models.training.forward import KEPT, KeptRows, token_logprobs
from models.training.grpo import recall_adapter
from models.training.learner import FusedLearner, make_learner
from models.training.lora import lora_config
from models.training.recall import Recall, recall_steps
from models.training.records import StepRecord
from models.training.trl_trainer import EpisodeGRPO
from tests.models.training.test_grpo import SMALL, weights
from tests.tokenizers_trained import random_ids

# A rate at which a step or two show, on weights that are random.
SETTINGS = replace(SMALL, groups=2, group_size=4, learning_rate=0.02)
PREFIX = 7


def success(row: int) -> Conversation:
    """Two turns behind a prefix that all share."""
    ids = [*random_ids(99, PREFIX), *random_ids(row, 30)]
    sampled = [PREFIX + 4 <= i < PREFIX + 9 or PREFIX + 14 <= i < PREFIX + 14 + row % 5 + 1 for i in range(len(ids))]
    return Conversation(ids, sampled, [0.0] * len(ids))


SUCCESSES = [success(row) for row in range(11)]


def recall(policy: Any, successes: list[Conversation] = SUCCESSES) -> Recall:
    return Recall(successes, LocalActor(policy), SETTINGS)


def nats(model: Any, successes: list[Conversation] = SUCCESSES) -> torch.Tensor:
    """Mean of minus the log-probability of the sampled tokens."""
    rows = [c.ids for c in successes]
    wanted = [[i for i, sampled in enumerate(c.sampled) if sampled] for c in successes]
    scored = token_logprobs(model, rows, PREFIX, wanted, 1.0)
    return -torch.cat([logprobs for logprobs, _ in scored]).mean()


def test_figures_are_means_over_tokens_however_rows_are_cut(tiny_model: Any, tmp_path: Path) -> None:
    """A last micro-batch of one row weighed as much as one of many."""
    policy, renderer = tiny_model
    found = list[StepRecord]()
    for most in (1, 3, 64):
        settings = replace(SETTINGS, steps=1, micro_batch=most)
        recall_adapter(SUCCESSES, LocalActor(policy), renderer, settings, tmp_path / str(most), found.append)
    for name in ("entropy", "nll"):
        assert [r.metrics[name] for r in found] == pytest.approx([found[0].metrics[name]] * 3, rel=1e-6), name


def test_each_success_comes_once_before_any_comes_again_and_a_batch_follows_from_its_step(tiny_model: Any) -> None:
    made = recall(tiny_model[0])
    assert recall_steps(11, 3, SETTINGS) == math.ceil(33 / 8)
    seen: Counter[int] = Counter()
    for step in range(11):  # eight times all of them
        batch = [made.successes.index(c) for c in made.batch(step)]
        assert len(batch) == 8
        seen.update(batch)
        assert max(seen.values()) - min(seen[i] for i in range(11)) <= 1
    assert set(seen.values()) == {8}
    assert [c.ids for c in recall(tiny_model[0]).batch(5)] == [c.ids for c in made.batch(5)]
    assert [c.ids for c in made.batch(0)] != [c.ids for c in SUCCESSES[:8]]  # in an order that is drawn


def test_the_gradient_is_that_of_the_likelihood_of_what_was_sampled(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sampled it: the stored log-probabilities, here 0, make no difference."""
    policy, renderer = tiny_model
    found: list[dict[str, torch.Tensor]] = []
    plain = EpisodeGRPO.training_step

    def watched(self: EpisodeGRPO, *given: Any, **more: Any) -> torch.Tensor:
        loss = plain(self, *given, **more)
        named = self.accelerator.unwrap_model(self.model).named_parameters()
        found.append({n: p.grad.clone() for n, p in named if p.requires_grad and p.grad is not None})
        return loss

    monkeypatch.setattr(EpisodeGRPO, "training_step", watched)
    settings = replace(SETTINGS, steps=1)
    torch.manual_seed(1)
    recall_adapter(SUCCESSES, LocalActor(policy), renderer, settings, tmp_path, lambda _: None)
    peft = get_peft_model(policy.model, lora_config(settings, policy.model))
    try:
        set_peft_model_state_dict(peft, load_file(tmp_path / "weights" / "step-0" / WEIGHTS))
        nats(peft.get_base_model(), recall(policy).batch(0)).backward()
        expected = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad and p.grad is not None}
        assert expected.keys() == found[0].keys()
        assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
        for name, gradient in expected.items():
            assert torch.allclose(found[0][name], gradient, atol=1e-5), name
    finally:
        peft.unload()


def test_successes_become_likelier_and_a_recall_that_was_stopped_goes_on_to_the_same_weights(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, renderer = tiny_model
    before, steps = weights(policy), list[StepRecord]()
    settings = replace(SETTINGS, steps=recall_steps(11, 4, SETTINGS))

    def made(folder: str, on_step: Any) -> Any:
        return recall_adapter(SUCCESSES, LocalActor(policy), renderer, settings, tmp_path / folder, on_step)

    whole = made("whole", steps.append)
    assert [r.step for r in steps] == [1, 2, 3, 4, 5, 6]
    assert whole.ending == "steps"
    with torch.no_grad():
        assert steps[0].metrics["nll"] == pytest.approx(float(nats(policy.model, recall(policy).batch(0))), abs=0.01)
    assert steps[-1].metrics["nll"] < steps[0].metrics["nll"] - 0.1
    assert all(math.isfinite(r.loss) and r.logprob_gap == 0 and not r.groups for r in steps)

    def dying(record: StepRecord) -> None:
        if record.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made("killed", dying)
    again: list[StepRecord] = []
    resumed = made("killed", again.append)
    assert [r.step for r in again] == [4, 5, 6]
    one, two = (load_file(result.folder / WEIGHTS) for result in (whole, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(before[name], weight) for name, weight in weights(policy).items())


def test_no_distance_to_the_base_is_measured_on_what_the_policy_has_not_sampled(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost a pass of the base in every step."""
    policy, renderer = tiny_model

    def measured(*given: Any) -> None:
        raise AssertionError("the base was asked")

    monkeypatch.setattr(EpisodeGRPO, "_measure_kl", measured)
    steps = list[StepRecord]()
    settings = replace(SETTINGS, steps=2)
    recall_adapter(SUCCESSES, LocalActor(policy), renderer, settings, tmp_path, steps.append)
    assert [record.kl for record in steps] == [0.0, 0.0]


def test_where_all_prompts_are_equal_the_first_sampled_token_is_learnt_behind_the_last_one_of_its_prompt(
    tiny_model: Any, tmp_path: Path
) -> None:
    policy, renderer = tiny_model
    prompt, steps = random_ids(5, 12), list[StepRecord]()
    rows = [[*prompt, *random_ids(row, 3)] for row in range(8)]
    alike = [Conversation(ids, [i >= 12 for i in range(len(ids))], [0.0] * len(ids)) for ids in rows]
    assert recall(policy).shared == PREFIX, "as before where rows part earlier"
    assert recall(policy, alike).shared == recall(policy, alike[:1]).shared == 11
    recall_adapter(alike, LocalActor(policy), renderer, replace(SETTINGS, steps=1), tmp_path, steps.append)
    with torch.no_grad():
        assert steps[0].metrics["nll"] == pytest.approx(float(nats(policy.model, alike)), abs=1e-4)
        with pytest.raises(TrainingError, match="the token at 12 cannot be scored behind 12 shared ids"):
            token_logprobs(policy.model, rows, 12, [[12, 13]] * 8, 1.0)


def test_nothing_to_learn_from_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    mute = Conversation(random_ids(1, 9), [False] * 9, [0.0] * 9)
    with pytest.raises(TrainingError, match=r"no success to learn from.*train\.generalist"):
        recall_adapter([mute], LocalActor(policy), renderer, SETTINGS, tmp_path, lambda _: None)


@pytest.mark.parametrize("most", [KEPT, 20_000, 0])
def test_the_frozen_layers_see_each_success_once_as_far_as_there_is_room(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What is kept of a row decides how often the frozen layers work on it, and nothing else."""
    policy, renderer = tiny_model
    settings, learners = replace(SETTINGS, steps=4), list[FusedLearner]()

    def made(*args: Any) -> Any:
        learners.append(make_learner(*args))
        return learners[-1]

    monkeypatch.setattr("models.training.trl_trainer.make_learner", made)
    monkeypatch.setattr("models.training.trl_trainer.KeptRows", lambda: KeptRows(most))
    kept = recall_adapter(SUCCESSES, LocalActor(policy), renderer, settings, tmp_path / "kept", lambda _: None)
    monkeypatch.setattr(Recall, "repeats", property(lambda _: False, lambda *_: None), raising=False)
    monkeypatch.setattr(FusedLearner, "branches", False)  # rows stay whole in both: the sums are added up in one order
    anew = recall_adapter(SUCCESSES, LocalActor(policy), renderer, settings, tmp_path / "anew", lambda _: None)
    one, two = (load_file(result.folder / WEIGHTS) for result in (kept, anew))
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    saved = learners[1].work.trained_forward - learners[0].work.trained_forward
    shared, batches = recall(policy).shared, [c for step in range(4) for c in recall(policy).batch(step)]
    passed = [max(i for i, sampled in enumerate(c.sampled) if sampled) - shared for c in batches]
    again = sum(count for place, count in enumerate(passed) if batches[place] in batches[:place])
    # Without room what is twice in one batch is still passed through once.
    assert {KEPT: saved == again, 20_000: 0.2 * again < saved < again, 0: saved < 0.2 * again}[most], (saved, again)
