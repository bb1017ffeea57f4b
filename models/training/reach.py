"""Whether adapters reach the servers' model at all: proven with a random one before the first episode is played.

The first step's adapter is zero and moves nothing, so a server that drops what it cannot name (its
`--lora-target-modules`, an architecture that it knows otherwise) would be found out a whole diagnosis and a step later.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from errors import AdapterError, ConfigurationError
from models.adapters.files import adapter_digest, export_adapter, order_config
from models.adapters.fingerprint import prove, take_fingerprint
from models.training.lora import lora_config
from models.training.records import TrainingSettings
from models.vllm.same_base import probe_ids

if TYPE_CHECKING:
    from models.local.base import BaseModel
    from models.vllm.policy import VllmPolicy

# Standard deviation of B: the probe moves a text by tenths of a nat or more, so that rounding is no excuse.
SIZE = 0.2


def prove_adapters_reach(policy: VllmPolicy, base: BaseModel, folder: Path, rank: int) -> None:
    """`folder` is one that the servers see, `rank` that of training. Raises `ConfigurationError` for the first server
    that does not answer with a random adapter on the first and last layer as the trainer's model does."""
    name = f"probe-{uuid.uuid4().hex[:8]}"
    place = _written(base.policy.model, folder / name, rank)
    url = ""
    try:
        digest = adapter_digest(place)
        base.policy.load_adapter(name, digest, place)
        policy.load_adapter(name, digest, place)
        taken = take_fingerprint(base.policy, probe_ids(policy, base), name)
        for server in policy.servers:
            url = server.url
            prove(server, taken, name)
    except AdapterError as problem:
        where = url or ", ".join(server.url for server in policy.servers)
        raise ConfigurationError(
            f"{where} does not take adapters as they are trained on {base.identity.base!r}: {problem}; start the "
            "server without --lora-target-modules, or with all that are trained (docs/3-platform.md, Models)"
        ) from problem
    finally:
        for holder in (base.policy, policy):
            if name in holder.adapters:
                holder.unload_adapter(name)
        shutil.rmtree(place, ignore_errors=True)


def _written(model: Any, folder: Path, rank: int) -> Path:
    """A random adapter of the shape that is trained, on the first and last layer; the model is left as it was."""
    from peft import get_peft_model

    config = lora_config(TrainingSettings(rank=rank, alpha=rank, upper_layers=None), model)
    config.layers_to_transform = sorted({0, model.config.num_hidden_layers - 1})
    written = folder.with_name(f".{folder.name}")
    draws = torch.Generator().manual_seed(0)
    peft = get_peft_model(model, config)
    try:
        with torch.no_grad():
            for key, weight in peft.named_parameters():
                if "lora_" in key:
                    size = SIZE if "lora_B" in key else weight.shape[1] ** -0.5
                    weight.copy_(size * torch.randn(weight.shape, generator=draws).to(weight))
        peft.save_pretrained(str(written), safe_serialization=True)
    finally:
        peft.unload()
        model.requires_grad_(False)
    try:
        return export_adapter(order_config(written), folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
