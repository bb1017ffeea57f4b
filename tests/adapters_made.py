"""LoRA adapters for tests, made in a second instead of trained: random weights of a chosen size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.adapters.files import CONFIG, WEIGHTS, export_adapter, order_config

UPPER = (28, 29)
MODULES = ("q_proj", "v_proj", "down_proj")


def make_adapter(
    model: Any,
    folder: Path,
    size: float = 0.3,
    seed: int = 0,
    rank: int = 4,
    layers: tuple[int, ...] = UPPER,
    modules: tuple[str, ...] = MODULES,
) -> Path:
    """An adapter folder for `model` (left as it was) on two upper layers; `size` 0 leaves B at zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(modules),
        layers_to_transform=list(layers),
        task_type="CAUSAL_LM",
    )
    draws = torch.Generator().manual_seed(seed)
    peft = get_peft_model(model, config)
    try:
        with torch.no_grad():
            for name, weight in peft.named_parameters():
                if "lora_" in name:
                    scale = size if "lora_B" in name else 0.05
                    weight.copy_(scale * torch.randn(weight.shape, generator=draws).to(weight))
        written = folder.with_name(f"{folder.name}.written")
        peft.save_pretrained(str(written), safe_serialization=True)
    finally:
        peft.unload()
        model.requires_grad_(False)
    return export_adapter(order_config(written), folder)


def renamed(source: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of an adapter whose modules have other names, as one trained on another base has."""
    folder.mkdir()
    config = json.loads((source / CONFIG).read_text())
    config["target_modules"] = [m.replace(old, new) for m in config["target_modules"]]
    (folder / CONFIG).write_text(json.dumps(config))
    weights = load_file(source / WEIGHTS)
    save_file({key.replace(old, new): value for key, value in weights.items()}, folder / WEIGHTS)
    return folder
