"""Which weights an adapter trains, and with what settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from errors import TrainingError
from models.local.shapes import has_experts
from models.training.records import TrainingSettings

if TYPE_CHECKING:
    from peft import LoraConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# What some architectures hold in the place of several of them.
FUSED_ATTENTION, FUSED_GATE = "qkv_proj", "gate_up_proj"


def target_modules(model: Any) -> list[str]:
    """The projections of a model's layers that an adapter trains, by the last part of their names: all of them, or
    those of attention alone where layers have experts. Experts lie in one tensor that servers and PEFT name
    differently: an adapter on them could be dropped by one side without a word.

    Raises `TrainingError` for a model without any.
    """
    wanted = {*ATTENTION, FUSED_ATTENTION} if has_experts(model.config) else {*PROJECTIONS, FUSED_ATTENTION, FUSED_GATE}
    found = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if "layers." in name} & wanted
    if not found:
        raise TrainingError(
            f"a model of type {model.config.model_type} has no projection named {', '.join(sorted(wanted))}, so "
            "there is nothing to adapt; give another base model"
        )
    return sorted(found, key=[*PROJECTIONS, FUSED_ATTENTION, FUSED_GATE].index)


def lora_config(settings: TrainingSettings, model: Any) -> LoraConfig:
    """LoRA on the projections of a model's upper layers, as vLLM can load it: no DoRA, bias or saved modules."""
    from peft import LoraConfig

    layers = model.config.num_hidden_layers
    upper = None if settings.upper_layers is None else list(range(max(0, layers - settings.upper_layers), layers))
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=target_modules(model),
        layers_to_transform=upper,
        task_type="CAUSAL_LM",
    )


@contextmanager
def adapted(model: Any, settings: TrainingSettings) -> Iterator[tuple[Any, LoraConfig]]:
    """Within, a model has the LoRA layers of a training: the PEFT model, and its configuration. Afterwards it is as it
    was found, its configuration included, of which TRL and transformers change fields.

    What a model leaves to chance while it is trained (dropout, the jitter of a router) stays off, whoever calls
    `train`: the sampler has none, and the ratio to it would be of noise.
    """
    from peft import get_peft_model

    modes = [(module, module.training) for module in model.modules()]
    before = [(part, dict(vars(part))) for part in (model.config, model.generation_config) if part is not None]
    names = set(vars(model))
    lora = lora_config(settings, model)
    peft: Any = get_peft_model(model, lora)
    peft.eval()

    def train(mode: bool = True) -> Any:
        peft.training = mode  # TRL looks at it; no module below does
        return peft

    peft.train = train
    try:
        yield peft, lora
    finally:
        peft.unload()
        if settings.recompute:
            model.gradient_checkpointing_disable()
        for module, mode in modes:
            module.training = mode
        for part, fields in before:
            vars(part).clear()
            vars(part).update(fields)
        for name in set(vars(model)) - names:
            delattr(model, name)
