"""A prefix that all rows share, from one step to the next; and a small adapter in bf16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer

from models.adapters.deltas import Delta
from models.training import forward
from models.training.forward import Parted, StepPrefix, token_logprobs
from models.training.learner import PlainLearner, _Matrix, _Product, make_learner
from models.training.lora import lora_config
from tests.models.training.test_grpo import SMALL, lora
from tests.shapes_made import tiny_model as tiny_shape
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


GROUP = [[9] * 12 + ending for ending in ([3, 4] * 6, [3, 4] * 4, [3, 4] * 6, [5], [3, 4] * 6 + [7, 8])]
OTHERS = [random_ids(7, 20), [9] * 7 + [2, 2, 2], [6]]


def test_what_rows_begin_alike_with_stands_once() -> None:
    rows = [*GROUP, *OTHERS]
    parted = Parted(rows, 8)
    flat = [i for ids in parted.ids for i in ids]
    assert [[flat[place] for place in places] for places in parted.places] == rows
    # The prompt of twelve, the first eight of what four sampled, and what comes then: of two that are the same, one.
    assert sorted(map(len, parted.ids)) == [1, 1, 4, 6, 8, 10, 12, 20]
    ends = [sum(map(len, parted.ids[: i + 1])) for i in range(len(parted.ids))]
    for ids, after, start, end in zip(parted.ids, parted.after, parted.starts, ends, strict=True):
        assert start == sum(last - first for first, last in after)
        assert all(last <= end - len(ids) for _, last in after), "what a row goes on from stands before it"
    whole = Parted(rows, None)
    assert (whole.ids, set(whole.after)) == (rows, {()})


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_that_begin_alike_have_the_values_and_gradients_of_whole_ones(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    policy, _ = tiny_model
    peft, before = lora(policy), random_ids(50, 9)
    if kernels:
        monkeypatch.setattr(forward, "attend_plain", forward.attend_by_kernels)
    rows = [before + row for row in (*GROUP, *OTHERS[:2])]
    wanted = [[p for p in range(11, len(row)) if p % 2] for row in rows]
    found = []
    for branches in (True, False):
        learner = make_learner(peft.get_base_model(), policy.decoder)
        learner.branches = branches
        peft.zero_grad()
        prefix = StepPrefix(learner, before)
        scored = token_logprobs(learner, rows, 9, wanted, 0.7, prefix)
        sum(((1 + i) * chosen).sum() for i, (chosen, _) in enumerate(scored)).backward()
        prefix.backward()
        values = [x.detach() for pair in scored for x in pair]
        found.append((values, [p.grad for p in peft.parameters() if p.grad is not None], learner.work))
    (values, gradients, fewer), (expected, plain, all_of_them) = found
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(values, expected, strict=True))
    largest = [float(g.abs().max()) for g in plain]
    assert min(largest) > 1e-2
    for got, truth, most in zip(gradients, plain, largest, strict=True):
        assert torch.allclose(got, truth, atol=1e-5 * most)
    assert fewer.trained_backward < 0.7 * all_of_them.trained_backward
    assert fewer.seen_backward < 0.7 * all_of_them.seen_backward


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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [1e-4, 1e-3])
def test_bf16_sees_all_of_a_small_adapter(size: float, biased: bool) -> None:
    """An adapter of a first step is less than half a unit in the last place of what it is added to. Two stacked parts;
    the gradients are those of fp32."""
    torch.manual_seed(0)
    base = [torch.randn(width, 64) / 8 for width in (96, 160)]
    bias = torch.randn(256).bfloat16() if biased else None
    matrix = _Matrix([weight.bfloat16() for weight in base], bias)
    x, lora = (
        torch.randn(300, 64),
        [part for w in base for part in (torch.randn(4, 64) / 8, size * torch.randn(len(w), 4))],
    )
    given = [part.bfloat16().float() for part in (x, *lora)]
    whole = matrix.weight.float(), None if bias is None else bias.float()
    wide = [part.clone().requires_grad_() for part in given]
    delta = torch.cat([2.0 * wide[0] @ a.t() @ b.t() for a, b in zip(wide[1::2], wide[2::2], strict=True)], 1)
    expected = torch.nn.functional.linear(wide[0], *whole) + delta
    narrow = [given[0].bfloat16().requires_grad_(), *(part.clone().requires_grad_() for part in given[1:])]
    y = _Product.apply(narrow[0], matrix, (2.0, 2.0), *narrow[1:])
    moved = (y - matrix(narrow[0])).detach().float()
    seen = (moved * delta).sum() / delta.square().sum()
    assert float(seen) == pytest.approx(1.0, abs=0.05)
    assert torch.allclose(y.float(), expected, rtol=2**-8, atol=1e-3), "rounded once"
    weigh = torch.randn_like(expected).bfloat16()
    y.backward(weigh)
    expected.backward(weigh.float())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() < 0.02 * theirs.grad.norm()


def test_bf16_sees_all_of_a_small_adapter_through_peft_where_this_process_samples() -> None:
    """As the sampler does. vLLM adds as PEFT does, so there PEFT's forward stays."""
    causal = tiny_shape("qwen2").bfloat16()
    get_peft_model(causal, lora_config(SMALL, causal))
    layers: list[Any] = [m for m in causal.modules() if isinstance(m, LoraLayer)]
    make_learner(causal)
    assert not any("forward" in vars(m) for m in layers)
    assert isinstance(make_learner(causal, SimpleNamespace()), PlainLearner)
    for layer in layers:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.nn.init.normal_(b, std=1e-3)
        x = torch.randn(2, 200, a.shape[1]).bfloat16()
        with torch.no_grad():
            delta = layer.scaling["default"] * x.float() @ a.t() @ b.t()
            moved = (layer(x) - layer.base_layer(x)).float()
        assert float((moved * delta).sum() / delta.square().sum()) == pytest.approx(1.0, abs=0.1)
    assert layers
