"""Architectures other than Llama's: what is sampled and what is trained are transformers' own figures, and what cannot
be played is refused by its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from errors import ConfigurationError, ContextOverflow
from models.local.attention import NAME
from models.local.base import load_base, load_renderer
from models.local.decoder import make_decoder
from models.local.model_files import check_base_config
from models.local.policy import LocalPolicy
from models.local.shapes import context_of, has_experts
from models.policy import PolicyIdentity, Request, Sampling
from models.training.forward import token_logprobs
from models.training.learner import PlainLearner
from models.training.lora import lora_config
from models.training.records import TrainingSettings
from models.vllm.same_base import prove_same_base
from tests.shapes_made import SHAPES, tiny_config, tiny_model
from tests.tokenizers_trained import random_ids

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + 1.5 * i for i in range(16)],
    "original_max_position_embeddings": 64,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}


def logprobs_of(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of `ids[1:]` by transformers' own pass."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("kind", SHAPES)
def test_sampled_figures_are_those_of_transformers(kind: str) -> None:
    """A shared prefix, rows of several lengths, turns that go on: windows begin before, in and after the prefix."""
    policy = LocalPolicy(tiny_model(kind), PolicyIdentity("tiny", "1", "float32", "", ""), frozenset(), 4)
    eager, prefix = tiny_model(kind, "eager"), random_ids(1, 9)
    prompts = [prefix + random_ids(row, length) for row, length in ((2, 1), (3, 4), (4, 12))]
    requests = [Request(f"r{i}", ids, Sampling(1.0, 5, seed=i), shared=9) for i, ids in enumerate(prompts)]
    for request, answer in zip(requests, policy.generate(requests), strict=True):
        whole = [*request.prompt, *answer.ids]
        with torch.no_grad():
            expected = logprobs_of(eager, whole)[-5:]
        assert torch.tensor(answer.logprobs) == pytest.approx(expected, abs=1e-4)
        assert policy.score(whole, 12) == pytest.approx(policy.score(whole, 14)[2:], abs=1e-4)
        assert policy.score(whole, 5) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_trained_gradient_is_that_of_transformers(kind: str) -> None:
    rows = [random_ids(1, 9) + random_ids(row, length) for row, length in ((2, 6), (3, 11))]
    wanted = [range(10, len(row)) for row in rows]
    gradients, figures = [], []
    for attention in ("trace_shared_prefix", "eager"):
        model = tiny_model(kind, attention)
        torch.manual_seed(3)
        peft = get_peft_model(model, lora_config(TrainingSettings(rank=2, alpha=4, upper_layers=None), model))
        learning = {name: weight for name, weight in peft.named_parameters() if weight.requires_grad}
        for weight in learning.values():
            torch.nn.init.normal_(weight, 0.0, 0.1)
        if attention == "eager":
            scored = [logprobs_of(model, row, 0.7)[9:] for row in rows]
        else:
            scored = [logprobs for logprobs, _ in token_logprobs(model, rows, 9, wanted, 0.7)]
        torch.cat(scored).sum().backward()
        figures.append(torch.cat(scored).detach())
        gradients.append({name: weight.grad for name, weight in learning.items()})
    assert torch.allclose(*figures, atol=1e-4)
    assert all(torch.allclose(g, gradients[1][name], atol=2e-3, rtol=1e-3) for name, g in gradients[0].items())
    assert any(g.abs().max() > 0.1 for g in gradients[0].values())


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        ("qwen3_next", LINEAR, "layers of kind linear_attention"),
        ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ("deepseek_v3", {}, "latent"),
        ("mamba", {}, "linear_attention"),
        ("gemma3", {}, "nested"),
        ("t5", {}, "encoder"),
    ],
)
def test_what_cannot_be_played_is_refused_before_it_is_loaded(
    tmp_path: Path, kind: str, changed: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2} | changed))
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}.*{kind}.*{why}.*give"):
        check_base_config(str(tmp_path))


def test_a_cap_of_the_logits_of_a_base_in_bf16_is_not_rounded() -> None:
    decoder = make_decoder(tiny_model("gemma2").bfloat16())
    hidden = 4 * torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = decoder.model.lm_head(hidden).float()
    assert torch.equal(decoder.head(hidden), 3 * torch.tanh(logits / 3))


@pytest.mark.parametrize(("kind", "changed"), [("granite", {"logits_scaling": 6.0}), ("cohere", {"logit_scale": 0.83})])
def test_sampler_and_trainer_round_the_scaled_logits_of_a_base_in_bf16_alike(
    kind: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, kind, changed)
    model = tiny_model(kind).bfloat16()
    hidden = 8 * torch.randn(30, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.arange(30)
    with torch.no_grad():
        trained, _ = PlainLearner(model).score(hidden, targets, 1.0)
        sampled = torch.log_softmax(make_decoder(model).head(hidden).float(), -1).gather(1, targets[:, None])[:, 0]
    assert sampled.tolist() == pytest.approx(trained.tolist(), abs=1e-4)


def test_every_shape_that_is_played_passes_the_check(tmp_path: Path) -> None:
    for kind in SHAPES:
        tiny_config(kind).save_pretrained(tmp_path)
        check_base_config(str(tmp_path))


def test_a_part_that_is_left_out_is_found_when_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any
) -> None:
    """As an architecture would be that scales its logits in a field of its own."""
    tiny_model("granite", vocabulary=len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    base = load_base(str(tmp_path), "float32")
    assert base.policy.model.config._attn_implementation == NAME, "as it was"
    monkeypatch.setattr("models.local.decoder.head_of", lambda config: (1.0, None))
    with pytest.raises(ConfigurationError, match=r"type granite.*not covered.*nats a token.*give another"):
        load_base(str(tmp_path), "float32")


@pytest.mark.parametrize(("kind", "told"), [("qwen2_moe", False), ("qwen2", True)])
def test_a_window_that_only_the_mask_of_transformers_knows_is_found_in_a_text_that_is_shorter(
    kind: str, told: bool, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1, "num_experts": 4}
    monkeypatch.setitem(SHAPES, kind, changed)
    tiny_model(kind, vocabulary=len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    if told:
        model = load_base(str(tmp_path), "float32").policy.model
        windows = [model.config.sliding_window, *(layer.self_attn.sliding_window for layer in model.model.layers)]
        assert windows == [100, None, 100], "as they were"
    else:
        with pytest.raises(ConfigurationError, match=r"type qwen2_moe.*not covered.*nats a token"):
            load_base(str(tmp_path), "float32")


def test_files_that_lack_weights_are_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """transformers would draw them at random, in each process others."""
    model = tiny_model("llama", vocabulary=len(tiny_tokenizer))
    tiny_tokenizer.save_pretrained(tmp_path)
    weights = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.down" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigurationError, match=r"lack 1 of its weights, such as model\.layers\.1\.mlp\.down"):
        load_base(str(tmp_path), "float32")


def test_a_tokenizer_of_another_format_is_refused_in_words(tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny_model("llama", vocabulary=len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "of tomorrow"}}))
    for load in (load_base, load_renderer):
        with pytest.raises(ConfigurationError, match=rf"{tmp_path}.*its tokenizer cannot be read.*give"):
            load(str(tmp_path))


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "falcon", "nemotron"])
def test_a_model_that_is_built_otherwise_is_refused_in_words(kind: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Its configuration does not tell, and its code stumbles over what the pass of sampler and trainer asks for."""
    tiny_model(kind, "eager", vocabulary=len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    check_base_config(str(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}.*can be neither played nor trained.*Error.*give"):
        load_base(str(tmp_path), "float32")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("phi3", "down_proj gate_up_proj o_proj qkv_proj"),
        ("glm4", "down_proj gate_up_proj k_proj o_proj q_proj v_proj"),
        ("qwen3_moe", "k_proj o_proj q_proj v_proj"),
        ("glm4_moe", "k_proj o_proj q_proj v_proj"),
        ("gpt_oss", "k_proj o_proj q_proj v_proj"),
    ],
)
def test_experts_are_left_alone_and_fused_projections_are_found(kind: str, names: str) -> None:
    model = tiny_model(kind)
    assert sorted(lora_config(TrainingSettings(), model).target_modules) == names.split()
    assert has_experts(model.config) == ("gate" not in names)


def longrope_model(attention: str = NAME) -> Any:
    """A tiny Phi-3 whose positions are turned otherwise from 64 tokens on."""
    config = tiny_config("phi3")
    config.update({"original_max_position_embeddings": 64, "rope_parameters": dict(LONGROPE), "sliding_window": None})
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval().requires_grad_(False)


def test_no_row_of_a_base_with_longrope_crosses_the_mark_beyond_which_positions_are_turned_otherwise() -> None:
    """Beside a row of 65 tokens, one of 40 had other figures than alone."""
    policy = LocalPolicy(longrope_model(), PolicyIdentity("tiny", "1", "float32", "", ""), frozenset(), 4)
    eager, prefix = longrope_model("eager"), random_ids(1, 9)
    assert policy.context == 64
    longest = Request("longest", prefix + random_ids(3, 50), Sampling(1.0, 5, seed=2), shared=9)
    requests = [Request("short", prefix + random_ids(2, 26), Sampling(1.0, 5, seed=1), shared=9), longest]
    for request, answer in zip(requests, policy.generate(requests), strict=True):
        whole = [*request.prompt, *answer.ids]
        with torch.no_grad():
            expected = logprobs_of(eager, whole)[-5:]
        assert torch.tensor(answer.logprobs) == pytest.approx(expected, abs=1e-4)
        (trained, _), *_ = token_logprobs(longrope_model(), [whole], 9, [range(len(whole) - 5, len(whole))], 1.0)
        assert trained == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ContextOverflow):
        policy.submit(Request("over", prefix + random_ids(3, 51), Sampling(1.0, 5), shared=9))


def test_the_mark_counts_for_longrope_alone_and_by_kind_of_layer() -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    for given, context in ((LONGROPE, 64), ({"full_attention": LONGROPE}, 64), (yarn, 512), ({}, 512), (None, 512)):
        assert context_of(SimpleNamespace(max_position_embeddings=512, rope_parameters=given)) == context


def test_servers_of_a_base_with_longrope_that_take_more_tokens_than_its_mark_are_refused() -> None:
    policy: Any = SimpleNamespace(context=65, servers=[SimpleNamespace(url="http://one:8000", model="base")])
    base: Any = SimpleNamespace(
        policy=SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(rope_parameters=LONGROPE))),
        identity=SimpleNamespace(base="phi"),
    )
    with pytest.raises(ConfigurationError, match=r"one:8000 takes 65 tokens.*LongRoPE.*--max-model-len 64"):
        prove_same_base(policy, base)
