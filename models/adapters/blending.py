"""Several adapters as one: their weighted sum, as an adapter of its own that is registered and served like any other.

PEFT's `add_weighted_adapter` with `combination_type="cat"` is exactly the weighted sum of the deltas; its rank is the
sum of the ranks. Servers with a lower limit of rank get the closest adapter of that rank ("svd"). "ties_svd" merges the
deltas by TIES (Yadav et al., 2023, arXiv 2306.01708) and gives the closest adapter of the parts' own rank.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from errors import AdapterError
from models.adapters.files import CONFIG, export_adapter, order_config

# Weights are rounded to quarters: so few blends are possible that every one in demand can be published beforehand.
QUARTERS = 4
# Share of the largest changes that TIES keeps of each adapter: its paper's value.
TIES_DENSITY = 0.2
_BLEND = re.compile(r"blend(-[^-]+-[1-4])+")


def blend_name(weights: Mapping[str, float]) -> str:
    """The capability under which the blend of `weights` is registered; one capability with all the weight is itself.

    `weights` (capability -> share, "" is no adapter) are rounded to quarters; what rounds to nothing is left out.
    """
    parts = blend_parts(weights)
    if not parts:
        raise AdapterError(f"weights {dict(weights)} leave no adapter; give at least one above an eighth")
    if len(parts) == 1 and next(iter(parts.values())) == QUARTERS:
        return next(iter(parts))
    return "-".join(["blend", *(f"{name}-{quarters}" for name, quarters in sorted(parts.items()))])


def blend_parts(weights: Mapping[str, float]) -> dict[str, int]:
    """Capability -> quarters, of the adapters in a blend; empty when every share is below an eighth. They are never
    more than a whole: where rounding each up would be, those that it adds most to are rounded down."""
    if not weights or any(not 0 <= w <= 1 for w in weights.values()):
        raise AdapterError(f"weights {dict(weights)} are no shares; give a number from 0 to 1 for each capability")
    parts = {name: round(QUARTERS * weight) for name, weight in weights.items() if name}
    while sum(parts.values()) > QUARTERS:
        added = {name: quarters - QUARTERS * weights[name] for name, quarters in sorted(parts.items())}
        parts[max(added, key=added.__getitem__)] -= 1
    return {name: quarters for name, quarters in parts.items() if quarters}


def parts_named(name: str) -> dict[str, int]:
    """Capability -> quarters, of the blend that `blend_name` gave this name; empty for any other name."""
    if not _BLEND.fullmatch(name):
        return {}
    words = name.split("-")[1:]  # no capability's name has a dash
    return {capability: int(quarters) for capability, quarters in zip(words[::2], words[1::2], strict=True)}


def blend(model: Any, folders: Mapping[Path, float], destination: Path, most_rank: int = 0, ties: bool = False) -> Path:
    """Write the weighted sum of adapters to `destination` (which must not exist) and return it; with `ties` what TIES
    makes of them.

    `model` is the plain transformers model that they were trained on; it comes back as it was. `folders` gives each
    adapter's weight; `most_rank` 0 keeps the sum exact. Raises `AdapterError` for fewer than one adapter or a weight
    that is not above 0.
    """
    from peft import PeftModel

    if not folders or any(weight <= 0 for weight in folders.values()):
        raise AdapterError("give at least one adapter, each with a weight above 0")
    names = [f"part{i}" for i in range(len(folders))]
    first, *others = folders
    # As a copy that shares the weights: PEFT puts its layers into the model that it is given.
    wrapped = PeftModel.from_pretrained(model, str(first), adapter_name=names[0])
    try:
        for name, folder in zip(names[1:], others, strict=True):
            wrapped.load_adapter(str(folder), adapter_name=name)
        _name_layers(wrapped, names)
        ranks = [int(json.loads((folder / CONFIG).read_text("utf-8"))["r"]) for folder in folders]
        rank = sum(ranks)
        how: dict[str, Any] = {"combination_type": "cat"}
        if 0 < most_rank < rank:
            how = {"combination_type": "svd", "svd_rank": most_rank}
        if ties:
            how = {"combination_type": "ties_svd", "svd_rank": max(ranks), "density": TIES_DENSITY}
        wrapped.add_weighted_adapter(names, list(folders.values()), "blend", **how)
        with tempfile.TemporaryDirectory() as scratch:
            wrapped.save_pretrained(scratch, selected_adapters=["blend"])
            return export_adapter(order_config(Path(scratch) / "blend"), destination)
    finally:
        wrapped.unload()


def _name_layers(wrapped: Any, names: Sequence[str]) -> None:
    """Where adapters change different layers, have each one's configuration name its own. PEFT takes the first one's
    layers for the sum: what another changes beside them would be left out without a word."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for module, layer in wrapped.get_base_model().named_modules():
        for name in set(names) & set(getattr(layer, "lora_A", ())):
            found[name].add(module)
    if any(modules != found[names[0]] for modules in found.values()):
        for name, modules in found.items():
            config = wrapped.peft_config[name]
            config.target_modules, config.layers_to_transform, config.layers_pattern = modules, None, None
