"""LoRA adapters as deltas of weights: read from a live PEFT model or from a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from errors import AdapterError
from models.adapters.files import CONFIG, adapter_digest

WRAPPER = "base_model.model."


@dataclass(frozen=True)
class Delta:
    """A change of a linear layer's weight: `scaling` b a, with a of shape (rank, in) and b (out, rank).

    It stays in its factors: a weight in bf16 has no digits for a small change, its products have."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0

    @classmethod
    def dense(cls, change: torch.Tensor) -> Delta:
        """Any change (out, in), as one of full rank. Beside a weight in bf16 it costs a second product as large as the
        weight's own; adapters never need it."""
        return cls(torch.eye(change.shape[1], dtype=change.dtype, device=change.device), change)

    def whole(self, device: torch.device | None = None) -> torch.Tensor:
        """The change itself, (out, in), in fp32, on the factors' device or another."""
        device = device or self.a.device
        product: torch.Tensor = self.scaling * (self.b.to(device).float() @ self.a.to(device).float())
        return product


@torch.no_grad()
def lora_deltas(peft: Any, adapter: str = "default") -> dict[str, Delta]:
    """Module name -> delta, of every LoRA layer of a live PEFT model, as it is now, not as it learns on."""
    deltas = {}
    for name, module in peft.named_modules():
        if hasattr(module, "lora_A") and adapter in module.lora_A:
            a, b = (side[adapter].weight.detach().clone() for side in (module.lora_A, module.lora_B))
            deltas[name.removeprefix(WRAPPER)] = Delta(a, b, module.scaling[adapter])
    return deltas


@torch.no_grad()
def folder_deltas(folder: Path) -> tuple[str, dict[str, Delta]]:
    """Digest and deltas of an adapter folder (adapter_config.json and adapter_model.safetensors).

    Raises `AdapterError` for what is not a plain LoRA, and for a file that is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    digest = adapter_digest(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    if (
        config.get("peft_type") != "LORA"
        or config.get("use_dora")
        or config.get("bias", "none") != "none"
        or config.get("modules_to_save")
    ):
        raise AdapterError(
            f"{folder.name} is not a plain LoRA (no DoRA, bias, saved modules); train one with adapters.lora_config"
        )
    try:
        weights = load_file(folder / "adapter_model.safetensors")
    except (SafetensorError, OSError) as problem:
        raise AdapterError(
            f"{folder.name}/adapter_model.safetensors cannot be read: {problem}; download it again"
        ) from problem
    deltas = {}
    for key, a in weights.items():
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removesuffix(".lora_A.weight")
        b = weights.get(f"{name}.lora_B.weight")
        if b is None or b.shape[1] != a.shape[0]:
            raise AdapterError(f"{folder.name}: {name} has no matching lora_B; the file is damaged, download it again")
        module = name.removeprefix(WRAPPER)
        deltas[module] = Delta(a, b, _scaling(config, module, folder.name))
    if 2 * len(deltas) != len(weights):
        raise AdapterError(
            f"{folder.name} holds {len(weights)} tensors, of which lora_A and lora_B of {len(deltas)} linear layers "
            "can be used; train a plain LoRA on linear layers"
        )
    return digest, deltas


def _scaling(config: Mapping[str, Any], module: str, name: str) -> float:
    """The factor of a module's delta, as PEFT and vLLM have it: the first pattern that a module's name ends with says
    rank and alpha in the place of the configuration's."""
    found = []
    for key, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        own = (value for end, value in (config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({end})$", module))
        value = next(own, config.get(key))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise AdapterError(f"{name}/{CONFIG} has {key} = {value!r} for {module}, which is no number above 0")
        found.append(value)
    rank, alpha = found
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
