"""Which weights an adapter trains, and with what settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.training.records import TrainingSettings

if TYPE_CHECKING:
    from peft import LoraConfig

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_config(settings: TrainingSettings, layers: int) -> LoraConfig:
    """LoRA on the seven projections of the upper layers, as vLLM can load it: no DoRA, bias or saved modules."""
    from peft import LoraConfig

    upper = None if settings.upper_layers is None else list(range(max(0, layers - settings.upper_layers), layers))
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=list(PROJECTIONS),
        layers_to_transform=upper,
        task_type="CAUSAL_LM",
    )
