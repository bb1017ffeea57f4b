"""What a server can load, checked before it is asked to: rank, kind of adapter, modules and shapes of the base.

Only headers are read: nothing of an adapter is run or unpickled, and the base's weights are not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import AdapterError
from models.adapters.files import CONFIG, WEIGHTS, adapter_digest

# What vLLM's loader refuses or ignores (its PEFTHelper); rsLoRA and rank patterns are fine.
REFUSED = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "use_qalora", "alora_invocation_tokens")
PREFIX = "base_model.model."


@dataclass(frozen=True)
class ServerLimits:
    """`modules` of the base that an adapter may change, as name -> (out, in); `base` and `revision` as in the
    registry; `max_rank` is the server's --max-lora-rank."""

    base: str
    revision: str
    max_rank: int
    modules: Mapping[str, tuple[int, int]]


def linear_modules(model: Any) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the linear layers of a model inside its decoder layers (those that servers adapt)."""
    from torch import nn

    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "layers." in name
    }


def check_limits(folder: Path, limits: ServerLimits, tags: Mapping[str, str]) -> str:
    """Digest of the adapter folder, after checking that a server with these limits can serve it on the right base.

    `tags` are the registry's (`base`, `base_revision`). Raises `AdapterError` with what does not fit.
    """
    from safetensors import safe_open

    digest = adapter_digest(folder)
    name = folder.name
    theirs = (tags.get("base", limits.base), tags.get("base_revision", limits.revision))
    if theirs != (limits.base, limits.revision):
        raise AdapterError(
            f"{name} was trained on {theirs[0]} ({theirs[1]}), the server's base is {limits.base} ({limits.revision}); "
            "serve it on its own base"
        )
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    refused = [key for key in REFUSED if config.get(key)]
    if refused or config.get("bias", "none") != "none":
        raise AdapterError(f"{name} uses {(refused or ['bias'])[0]}, which vLLM does not load; train a plain LoRA")
    rank = max([int(config["r"]), *(int(r) for r in (config.get("rank_pattern") or {}).values())])
    if rank > limits.max_rank:
        raise AdapterError(
            f"{name} has rank {rank}, the server takes at most {limits.max_rank}; start it with --max-lora-rank {rank} "
            "and set policy.max_lora_rank"
        )
    with safe_open(str(folder / WEIGHTS), framework="numpy") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    _check_modules(name, shapes, limits, rank)
    return digest


def _check_modules(name: str, shapes: Mapping[str, tuple[int, ...]], limits: ServerLimits, rank: int) -> None:
    for key, shape in shapes.items():
        module, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight"):
            raise AdapterError(f"{name} holds {key!r}, which is no LoRA weight; train a plain LoRA")
        if module not in limits.modules:
            raise AdapterError(
                f"{name} changes {module!r}, which {limits.base} does not have as a linear layer that is adapted; "
                "train it on this base"
            )
        out, into = limits.modules[module]
        other = f"{key.removesuffix(f'.lora_{part}')}.lora_{'B' if part[0] == 'A' else 'A'}.weight"
        if other not in shapes:
            raise AdapterError(f"{name} holds {key!r} without {other!r}; the file is damaged, register it again")
        width, own = (shape[-1], shape[0]) if part[0] == "A" else (shape[0], shape[-1])
        if len(shape) != 2 or width != (into if part[0] == "A" else out) or own > rank:
            raise AdapterError(
                f"{name}: {key!r} has shape {shape}, the base's layer is ({out}, {into}) and the rank {rank}; "
                "train it on this base"
            )
