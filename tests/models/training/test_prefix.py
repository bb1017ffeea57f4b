"""A prefix that all rows share, from one step to the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.adapters.deltas import Delta
from models.training.forward import StepPrefix, token_logprobs
from models.training.learner import make_learner
from tests.models.training.test_grpo import lora
from tests.tokenizers_trained import random_ids


@pytest.mark.parametrize("recompute", [False, True])
def test_the_frozen_layers_see_a_prefix_once_and_its_beginnings_not_at_all(tiny_model: Any, recompute: bool) -> None:
    """A prefix of a later step, with other weights in the adapter, equals that of a learner that has seen none."""
    policy, _ = tiny_model
    peft, ids = lora(policy), random_ids(50, 9)
    learner = make_learner(peft.get_base_model(), policy.decoder, recompute)
    StepPrefix(learner, ids)
    with torch.no_grad():
        for parameter in peft.parameters():
            parameter.mul_(1.5 if parameter.requires_grad else 1.0)
    for shown, again in ((ids, 0), (ids[:6], 0), ([*ids[:6], 1, 2], 8), ([*ids[:6], 1], 0)):
        fresh = make_learner(peft.get_base_model(), policy.decoder, recompute)
        before = learner.work.trained_forward
        found, expected = StepPrefix(learner, shown), StepPrefix(fresh, shown)
        assert learner.work.trained_forward - before == 2 * len(shown) + again  # two of three layers learn
        for part, other in zip([*found.k_HPD, *found.v_HPD], [*expected.k_HPD, *expected.v_HPD], strict=True):
            assert torch.allclose(part, other, atol=1e-5)
        gradients = []
        for prefix in (found, expected):
            peft.zero_grad()
            sum(leaf.pow(2).sum() for leaf in prefix.k_HPD if leaf.requires_grad).backward()
            prefix.backward()
            gradients.append([p.grad.clone() for p in peft.parameters() if p.grad is not None])
        assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in zip(*gradients, strict=True))
        assert any(g.abs().sum() > 0 for g in gradients[0])


def test_what_the_sampler_has_merged_below_the_learning_layers_is_left_out(tiny_model: Any) -> None:
    """The adapter that sampled last may reach deeper than the one that is trained."""
    policy, _ = tiny_model
    deep = {n: torch.randn_like(part.base) for n, part in policy.decoder.layers.items() if ".layers.0." in n}
    deep = {n: Delta.dense(change) for n, change in deep.items()}
    peft, ids = lora(policy), random_ids(50, 12)
    learner = make_learner(peft.get_base_model(), policy.decoder)
    with torch.no_grad():
        ((expected, _),) = token_logprobs(learner, [ids], 0, [range(4, 12)], 1.0)
        policy.load_deltas("deep", "d", deep)
        moved = policy.score(ids, 8, "deep")
        ((found, _),) = token_logprobs(learner, [ids], 0, [range(4, 12)], 1.0)
        assert policy.score(ids, 8, "deep") == moved, "the sampler keeps it"
    policy.unload_adapter("deep")
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(torch.tensor(moved), torch.tensor(policy.score(ids, 8)), atol=0.1)
