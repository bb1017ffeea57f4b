"""Other architectures through the whole of a step: rollouts, GRPO, export, and the proof that the files are live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, MixtralConfig, PhiConfig

from environments.contract import Message, Prompt
from models.adapters.files import adapter_digest, export_adapter
from models.adapters.fingerprint import prove
from models.adapters.limits import ServerLimits, check_limits, linear_modules
from models.adapters.loading import fingerprint_on, load_folder
from models.local.attention import NAME
from models.local.base import load_base
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity
from models.renderer import Renderer
from models.training.actors import LocalActor
from models.training.grpo import train_adapter
from models.training.records import StepRecord
from tests.models.training.test_grpo import SMALL, Source
from tests.shapes_made import tiny_model
from tests.tokenizers_trained import header_tokenizer, tiny_policy


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss"]
)
def test_a_step_is_sampled_trained_exported_and_live(kind: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    where = tmp_path / "base"
    tiny_model(kind, vocabulary=len(tiny_tokenizer)).save_pretrained(where)
    tiny_tokenizer.save_pretrained(where)
    base, steps = load_base(str(where), "float32", rows=8), list[StepRecord]()
    settings = replace(SMALL, steps=1, learning_rate=1e-2, upper_layers=None)
    actor = LocalActor(base.policy)
    result = train_adapter(Source(), actor, base.renderer, settings, tmp_path / "out", steps.append)
    (step,) = steps
    assert step.logprob_gap < 1e-4
    assert step.metrics["sampler_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert step.metrics["grad_norm"] > 0
    made = export_adapter(result.folder, tmp_path / "made")
    limits = ServerLimits("base", "1", settings.rank, linear_modules(base.policy.model))
    assert check_limits(made, limits, {}) == adapter_digest(made)
    name = load_folder(base.policy, made, "toy", "round", adapter_digest(made))
    probe = base.renderer.start(Prompt("Answer."), [Message("user", "Please cancel order 512.")])
    taken = fingerprint_on(base.policy, probe, name)
    assert taken.largest_move > 0.01
    assert prove(base.policy, taken, name).apart == 0
    # PEFT's own pass over transformers' own attention answers as the sampler does with the exported files.
    plain = PeftModel.from_pretrained(tiny_model(kind, "eager", vocabulary=len(tiny_tokenizer)), made)
    with torch.no_grad():
        logits = plain(torch.tensor([taken.ids])).logits[0, :-1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(taken.ids[1:])[:, None])[:, 0]
    assert taken.adapted == pytest.approx(expected[-len(taken.adapted) :].tolist(), abs=1e-3)


def test_a_tokenizer_without_a_token_to_pad_with_can_be_trained_on(tmp_path: Path) -> None:
    """TRL pads with the tokenizer's token for it, or with the one that ends a text: this one has neither."""
    policy, renderer = tiny_policy(header_tokenizer())
    steps = list[StepRecord]()
    train_adapter(Source(), LocalActor(policy), renderer, replace(SMALL, steps=1), tmp_path / "out", steps.append)
    assert steps[0].metrics["grad_norm"] > 0
    assert steps[0].logprob_gap < 1e-4
    assert renderer.tokenizer.pad_token is None, "as it was found"


LAYOUT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        (PhiConfig(**LAYOUT, resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.1), False),
        (PhiConfig(**LAYOUT, resid_pdrop=0.1), True),
        (MixtralConfig(**LAYOUT, num_local_experts=4, router_jitter_noise=0.1), False),
    ],
)
def test_nothing_is_left_to_chance_in_the_pass_and_the_model_is_left_as_it_was_found(
    kind: Any, recompute: bool, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    torch.manual_seed(7)
    kind = type(kind)(**{**kind.to_dict(), "vocab_size": len(tiny_tokenizer)})
    model = AutoModelForCausalLM.from_config(kind, attn_implementation=NAME).float().eval()
    model.requires_grad_(False)
    renderer = Renderer(tiny_tokenizer)
    identity = PolicyIdentity("x", "1", "float32", "", renderer.fingerprint)
    policy, steps, passes = LocalPolicy(model, identity, renderer.stop_ids, 8), list[StepRecord](), list[bool]()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    found = model.config.to_dict(), model.generation_config.to_dict(), set(vars(model)), model.training
    settings = replace(SMALL, steps=1, upper_layers=None, recompute=recompute)
    train_adapter(Source(), LocalActor(policy), renderer, settings, tmp_path / "out", steps.append)
    assert steps[0].logprob_gap < 1e-4
    assert steps[0].clip_fraction == 0
    assert steps[0].metrics["sampler_ratio_worst"] == pytest.approx(1.0, abs=1e-3)
    assert steps[0].metrics["grad_norm"] > 0
    assert found == (model.config.to_dict(), model.generation_config.to_dict(), set(vars(model)), model.training)
    assert not any(module.training for module in model.modules())
    # Of what has a gradient all is computed again: the prefix and the micro-batches.
    assert sum(passes) == (2 if recompute else 1) * 3
