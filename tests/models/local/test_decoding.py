"""The decoder's own pass against transformers', the draws, and what falls back and says so."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.adapters.deltas import Delta
from models.local import packed
from models.local.attention import NAME, PrefixWeights, attend_decoding
from models.local.decoder import FusedDecoder, PlainDecoder, make_decoder
from models.local.drawing import BLOCK, draw
from models.local.kv_cache import KeyValueCache, PrefixPass, RowsPass
from models.policy import Request, Sampling
from models.work import Work
from tests.tokenizers_trained import random_ids


def llama(dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """A random Llama with several query heads to a key-value head, as the embedded model has them."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=BLOCK + 90,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        attn_implementation=NAME,
        **changed,
    )
    return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def states(decoder: Any, model: Any, gaps: bool = False) -> torch.Tensor:
    """Hidden states of a prefix, then of a pass that decodes some rows and begins others, with gaps between slots."""
    prefix_ids, slots = random_ids(1, 20, 300), [0, 7, 9] if gaps else [0, 1, 2]
    cache = KeyValueCache(model.config, 10, torch.empty(0, dtype=model.dtype))
    cache.reserve(40)
    shared = PrefixPass()
    found = [decoder.run(torch.tensor(prefix_ids), torch.arange(20), shared)]
    for starts, counts in (([0, 0, 0], [5, 7, 1]), ([5, 7, 1], [1, 1, 6]), ([6, 8, 7], [1, 1, 1])):
        ids = torch.tensor([i for s, c in zip(slots, counts, strict=True) for i in random_ids(s + c, c, 300)])
        positions = torch.tensor([20 + s + j for s, c in zip(starts, counts, strict=True) for j in range(c)])
        found.append(decoder.run(ids, positions, RowsPass(cache, slots, starts, counts, shared)))
    return torch.cat(found).float()


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("changed", [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 24}])
def test_the_fused_pass_equals_transformers(changed: dict[str, Any], gaps: bool) -> None:
    model = llama(**changed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    fused, plain = FusedDecoder(model), PlainDecoder(model, arranged=False)
    expected = states(plain, model, gaps)
    assert torch.allclose(states(fused, model, gaps), expected, atol=2e-4)
    hidden = expected[:4]
    assert torch.allclose(fused.head(hidden), plain.head(hidden), atol=1e-3)
    ids, positions = torch.tensor(random_ids(2, 9, 300)), torch.arange(9)
    means = [d.run(ids, positions, PrefixPass(), (1, 2)) for d in (fused, plain)]
    assert torch.allclose(*means, atol=2e-4)


@pytest.mark.parametrize("refused", [False, True])
def test_the_fused_pass_rounds_no_worse_in_bf16(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Against the same weights in fp32: the shorter pass is at most a quarter further away than transformers' own. Also
    where torch refuses to arrange a bf16 weight, as it does without AVX-512 and AVX-NE-CONVERT."""

    def refusing(*_: Any) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")

    model = llama(torch.bfloat16)
    exact = states(PlainDecoder(llama().to(torch.bfloat16).float(), arranged=False), llama())
    packed.kernels.cache_clear()
    try:
        if refused:
            monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refusing)
            assert not packed.can_arrange(model.lm_head.weight)
        apart = {
            name: (states(decoder, model) - exact).abs().mean()
            for name, decoder in (("fused", FusedDecoder(model)), ("plain", PlainDecoder(model, arranged=False)))
        }
    finally:
        packed.kernels.cache_clear()
    assert 0 < apart["fused"] < 1.25 * apart["plain"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_from_a_file_lies_where_the_weights_are(dtype: torch.dtype) -> None:
    linear = packed.Packed([torch.nn.Linear(4, 3, bias=False, device="meta", dtype=dtype)])
    linear.merge(0, Delta(torch.ones(2, 4), torch.ones(3, 2)))
    assert linear.weight.device.type == "meta"


@pytest.fixture(params=["arranged", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine, or those of a processor (and a GPU) that arranges nothing."""
    if request.param == "plain":
        monkeypatch.setattr(packed, "can_arrange", lambda weight: False)


def factors(out: int, rank: int, size: float, scaling: float) -> Delta:
    """A delta of an input of 96 whose effect on the product is about `size` beside a product of about 1."""
    a, b = torch.randn(rank, 96) / 96**0.5, torch.randn(out, rank) / rank**0.5
    return Delta(a, size / scaling * b, scaling)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1e-4, 1e-3, 0.1])
def test_a_delta_too_small_for_a_bf16_weight_has_its_whole_effect(size: float) -> None:
    """A unit in the last place of a product is 0.004 and more. What rounding takes from a single one the others have:
    of all of them the delta's effect is there, in each of the forms, and of stacked weights in its own rows alone."""
    torch.manual_seed(0)
    modules = [torch.nn.Linear(96, out).bfloat16().requires_grad_(False) for out in (64, 32, 48)]
    for module in modules:
        module.weight.normal_(std=96**-0.5)
    linear, exact = packed.Packed(modules), torch.cat([m.weight for m in modules]).float()
    deltas = {0: factors(64, 8, size, 2.0), 2: factors(48, 5, size, 0.5)}
    x = torch.randn(20_000, 96).bfloat16()
    other = torch.randn(len(x), 144).bfloat16()
    forms = [
        (linear, lambda y: y),
        (linear.silu, torch.nn.functional.silu),
        (lambda given: linear.times(given, other), lambda y: y * other),
        (lambda given: linear.plus(given, other), lambda y: y + other),
    ]
    before = [form(x).float() for form, _ in forms]
    for part, delta in deltas.items():
        linear.merge(part, delta)
    bias = torch.cat([m.bias for m in modules]).float()
    was = x.float() @ exact.T + bias
    effect = torch.zeros_like(was)
    effect[:, :64], effect[:, 96:] = x.float() @ deltas[0].whole().T, x.float() @ deltas[2].whole().T
    for (form, shape), base in zip(forms, before, strict=True):
        wanted = shape(was + effect) - shape(was)
        found = form(x).float() - base
        assert float((found * wanted).sum() / (wanted * wanted).sum()) == pytest.approx(1, abs=0.05)
        assert not found[:, 64:96].any()
    linear.bare = True
    assert torch.equal(linear(x).float(), before[0])
    linear.bare = False
    for part in deltas:
        linear.merge(part, None)
    assert torch.equal(linear(x).float(), before[0])


@pytest.mark.usefixtures("kernels")
def test_a_delta_is_merged_into_a_weight_in_fp32() -> None:
    torch.manual_seed(0)
    (module,) = [torch.nn.Linear(96, 64, bias=False)]
    linear, delta = packed.Packed([module]), factors(64, 8, 0.1, 2.0)
    linear.merge(0, delta)
    module.weight.data = module.weight + 2.0 * (delta.b @ delta.a)
    x = torch.randn(7, 96)
    assert torch.equal(linear(x), packed.Packed([module])(x))


@pytest.mark.skipif(not packed.halves(), reason="fp32 is multiplied with weights in fp16 on AVX2 alone")
def test_a_weight_of_bf16_numbers_in_fp32_is_read_from_fp16_and_nothing_is_lost() -> None:
    """Each form, and each row whatever is computed beside it: FBGEMM adds up one or two left over in another order."""
    torch.manual_seed(0)
    module = torch.nn.Linear(160, 96).bfloat16().float().requires_grad_(False)
    module.weight[0, :3] = torch.tensor([1e-6, 2.0**-17, 0.0]).bfloat16()
    linear, x, other = packed.Packed([module]), torch.randn(64, 160), torch.randn(64, 96)
    y = module(x)
    assert isinstance(linear.weight, torch.ScriptObject)
    forms = [(linear(x), y), (linear.silu(x), torch.nn.functional.silu(y))]
    forms += [(linear.times(x, other), y * other), (linear.plus(x, other), y + other)]
    for found, wanted in forms:
        assert torch.allclose(found, wanted, atol=2e-6)
    whole = linear(x)
    for rows in range(1, len(x)):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
    delta = Delta(torch.randn(4, 160), torch.randn(96, 4))
    linear.merge(0, delta)
    assert torch.allclose(linear(x), y + x @ delta.whole().T, atol=1e-3)
    linear.bare = True
    assert torch.equal(linear(x), whole)
    linear.bare = False
    linear.merge(0, None)
    assert torch.equal(linear(x), whole)


@pytest.mark.parametrize("number", [0.1, 1e5, float("nan")])
def test_a_weight_that_fp16_does_not_hold_stays_as_it_is(number: float) -> None:
    module = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
    module.weight.copy_(module.weight.bfloat16())
    module.weight[3, 5] = number
    linear, x = packed.Packed([module]), torch.randn(4, 64)
    assert isinstance(linear.weight, torch.Tensor)
    assert torch.allclose(linear(x), module(x), rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_a_shared_prefix_is_attended_to_alike_on_every_processor(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    """Its matrices are arranged on some; one query at a time, by definition, is the reference."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    torch.manual_seed(0)
    (k, v), q = torch.randn(2, 2, 50, 16), torch.randn(5, 6, 16)
    own_k, own_v = torch.randn(2, 5, 2, 7, 16)
    seen = [3, 7, 1, 5, 2]
    hidden = torch.full((5, 2, 1, 7), float("-inf"))
    for row, count in enumerate(seen):
        hidden[row, ..., :count] = 0.0
    prefix = PrefixWeights(k, v)
    assert prefix.arranged is (capability != "AVX2" and packed.can_arrange(k))
    found = attend_decoding(q, own_k, own_v, hidden.view(10, 1, 7), prefix)
    for row, count in enumerate(seen):
        for head in range(6):
            group = head // 3
            keys = torch.cat([k[group], own_k[row, group, :count]])
            weights = torch.softmax(keys @ q[row, head], dim=0)
            wanted = weights @ torch.cat([v[group], own_v[row, group, :count]])
            assert torch.allclose(found[row, head], wanted, atol=1e-5)


def test_other_models_go_through_transformers_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = llama(hidden_act="gelu")
    with caplog.at_level(logging.WARNING, "trace.models"):
        decoder = make_decoder(model)
    assert isinstance(decoder, PlainDecoder)
    assert "activation gelu" in caplog.text
    assert torch.allclose(states(decoder, model), states(PlainDecoder(model, arranged=False), model), atol=2e-4)


@pytest.mark.parametrize("words", [BLOCK - 3, 3 * BLOCK, 5 * BLOCK + 17])
def test_a_draw_is_where_the_cumulative_distribution_passes_the_number(words: int) -> None:
    torch.manual_seed(1)
    logits, temperatures = 3 * torch.randn(21, words), [0.3, 0.7, 1.0] * 7
    uniform = [float(u) for u in np.random.default_rng(3).random(21)]
    uniform[:3] = [0.0, 1 - 2**-53, 0.5]
    chosen, logprobs = draw(logits, temperatures, uniform)
    for row, temperature, u, token, value in zip(logits, temperatures, uniform, chosen, logprobs, strict=True):
        exact = torch.softmax(row.double() / temperature, -1)
        upto = exact.cumsum(-1)
        assert upto[token] >= u - 1e-5
        assert upto[token] - exact[token] <= u + 1e-5
        assert value == pytest.approx(float(exact[token].log()), abs=1e-4)


def test_a_draw_never_takes_a_word_without_weight() -> None:
    logits = torch.full((3, 2 * BLOCK), float("-inf"))
    logits[:, 5] = logits[:, BLOCK - 1] = 0.0
    assert draw(logits, [1.0] * 3, [0.0, 1 - 2**-53, None])[0] == [5, BLOCK - 1, 5]


def test_a_temperature_of_almost_nothing_takes_the_likeliest_word() -> None:
    """Divided by it, no logit would be finite: the pass would be lost, with the turns of all others in it."""
    torch.manual_seed(1)
    logits = 20 * torch.randn(3, 2 * BLOCK)
    chosen, logprobs = draw(logits, [1e-39, 2.3e-308, 5e-324], [0.5, 0.0, 0.99])
    assert (chosen, logprobs) == (logits.argmax(-1).tolist(), [0.0] * 3)


def test_work_is_counted_by_kind(tiny_model: Any) -> None:
    policy, _ = tiny_model
    before = Work(**vars(policy.work))
    prompt = random_ids(9, 12)
    policy.generate([Request(f"w{i}", [*prompt, 5, 6 + i], Sampling(0.7, 4, i), None, 12) for i in range(3)])
    done = policy.work.since(before)
    drawn = done.heads
    assert done.prefilled == 12 + 3 * 2  # the prefix once, then each row's own
    assert 3 < drawn <= 12
    assert done.decoded == drawn - 3  # all draws but each row's first come from a decoded token
    assert done.trained_forward == done.trained_backward == done.trained_heads == done.seen_forward == 0
    # The prefix sees 1 to 12 tokens, each row's own two 13 and 14, and decoded ones 15, 16, ... up to its last.
    assert done.seen_prefilling == sum(range(1, 13)) + 3 * (13 + 14)
    assert 15 * done.decoded <= done.seen_decoding <= sum(15 + i for i in range(3)) * 3
