"""Adapter files without a model behind them, registered in a second."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from models.adapters.files import AdapterRecord, RegisteredAdapter
from models.adapters.registry import Registry


def registered(registry: Registry, place: Path, capability: str, run: str, value: float = 1.0) -> RegisteredAdapter:
    """The next version of a capability; another `value` gives other bytes."""
    folder = place / f"{capability}-{value}"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"q.lora_A.weight": np.full((4, 8), value, np.float32)}, folder / "adapter_model.safetensors")
    return registry.register(AdapterRecord(capability, "tiny", "abc", "r1"), folder, run)
