"""Tiny random models of the architectures that people use, for the sampler, the trainer and a server: some hundred
thousand parameters each, with every part that tells the architecture from Llama's switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.local.attention import NAME

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By the name of the configuration: what differs from `_COMMON`. Windows are shorter than the tests' texts.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "gemma": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 6,
        "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"head_dim": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"head_dim": 32, "pad_token_id": None},
    "glm4_moe": {
        "head_dim": 32,
        "pad_token_id": None,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": 6},
    "phi3": {"pad_token_id": None, "sliding_window": 6},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.25},
}


def tiny_config(kind: str, vocabulary: int = 400, context: int = 512) -> Any:
    """Two layers, hidden 64, two heads of 32 over one key-value head."""
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return AutoConfig.for_model(kind, **common | dict(SHAPES.get(kind, {})))


def tiny_model(kind: str, attention: str = NAME, vocabulary: int = 400, context: int = 512) -> Any:
    """A random model of a kind in fp32, equal at every call."""
    torch.manual_seed(7)
    config = tiny_config(kind, vocabulary, context)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "sinks" in name or "bias" in name:
            torch.nn.init.normal_(weight, 0.5, 0.3)
    return model.requires_grad_(False)
