"""What a model's configuration asks of whoever plays and trains it, read without torch: so that an architecture that
cannot be played here is refused before anything is loaded.

Covered: attention over all tokens or a window of them, with scores that are capped and with sinks; experts; heads whose
logits are scaled or capped. Not covered: layers without attention (Mamba, gated linear attention), latent attention,
keys and values that layers share, and models of images, whose text part lies nested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAYED = frozenset({"full_attention", "sliding_attention"})
# Fields that hold the number of experts of a layer, and to how many of them a token is sent, by architecture.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


def why_not_played(config: Any) -> str:
    """Why the model in this process (sampler and trainer alike) cannot run this configuration; "" when it can."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is not config:
        return "its text part is nested beside parts for images or sound"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - PLAYED)
    if others:
        return f"it has layers of kind {', '.join(others)}"
    if getattr(config, "kv_lora_rank", None):
        return "its attention is latent (kv_lora_rank)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values (num_kv_shared_layers)"
    return ""


def longrope_mark(config: Any) -> int | None:
    """The tokens that a base with LongRoPE had at first (`original_max_position_embeddings`); None for another base. Of
    a pass that goes beyond them transformers turns every position by the long factors, else by the short ones."""
    given = getattr(config, "rope_parameters", None) or {}
    found = [given, *(part for part in given.values() if isinstance(part, Mapping))]  # for all layers, or by their kind
    marks = [part["original_max_position_embeddings"] for part in found if part.get("rope_type") == "longrope"]
    return min(map(int, marks), default=None)


def context_of(config: Any) -> int:
    """How many tokens a row of this base may have: where it has LongRoPE, none crosses its mark. Else keys and values
    that are kept would be turned otherwise than what is asked of them, and a row's figures would follow from the
    longest row that happens to be in its batch."""
    most, mark = int(config.max_position_embeddings), longrope_mark(config)
    return most if mark is None else min(most, mark)


def experts_of(said: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts a layer has by what `config.json` says, and how many of them a token goes through; (1, 1) for a
    model without any. Experts that every token goes through beside those are not counted."""
    experts, chosen = (max(1, *(int(said.get(name) or 1) for name in names)) for names in (_EXPERTS, _CHOSEN))
    return (experts, chosen) if experts > 1 else (1, 1)


def has_experts(config: Any) -> bool:
    """Whether tokens are sent to some of several experts (MoE)."""
    return experts_of({name: getattr(config, name, None) for name in _EXPERTS})[0] > 1


def head_of(config: Any) -> tuple[float, float | None]:
    """What comes after the head's product: the logits' factor, and the cap (cap tanh(logit / cap)), None for none."""
    factor = 1.0
    if config.model_type.startswith("cohere"):
        factor = float(config.logit_scale)
    elif scaling := getattr(config, "logits_scaling", None):
        factor = 1.0 / float(scaling)
    cap = getattr(config, "final_logit_softcapping", None)
    return factor, float(cap) if cap else None
