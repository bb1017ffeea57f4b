"""Weights in parts: of the frozen base each process of a training holds its share (`models/training/ranks.py`).

torch's FSDP2 gathers a layer from all processes where a pass reaches it, forward and back, and lets it go behind it; so
it does with the words (embedding and head). An adapter, which is added to the layers afterwards, stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from models.local.shapes import head_of


def is_parted(causal: Any) -> bool:
    """Whether the model's weights are in parts."""
    return hasattr(causal.model, "unshard")


def part_weights(causal: Any, count: int) -> None:
    """Leave this process one of `count` parts of a frozen model's weights, on its GPU if there is one. All processes do
    it, not necessarily at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    how: dict[str, Any] = {"mesh": init_device_mesh(device, (count,)), "reshard_after_forward": True}
    words, head = causal.get_input_embeddings(), causal.lm_head
    tied = head.weight is words.weight
    for layer in causal.model.layers:
        fully_shard(layer, **how)
    if head_of(causal.config)[1] is None:  # logits with a cap are differentiated through the head, which stays whole
        fully_shard(words, **how)
        if tied:
            head.weight = words.weight
        else:
            fully_shard(head, **how)
    fully_shard(causal.model, **how)
    if not tied and not _holds_parts(head):
        head.to(device)


def held_bytes(causal: Any) -> int:
    """Bytes of the model's weights that this process holds."""
    own = [p.to_local() if hasattr(p, "to_local") else p for p in causal.parameters()]
    return sum(p.untyped_storage().nbytes() for p in own)


@contextmanager
def whole_head(causal: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The head's weight (vocabulary, hidden) and bias, whole within. All processes enter together, after a pass of the
    layers."""
    head, words = causal.lm_head, causal.get_input_embeddings()
    holder = words if head.weight is words.weight else head
    if not _holds_parts(holder):
        yield head.weight.detach(), head.bias
        return
    holder.unshard()
    try:
        yield holder.weight.detach(), head.bias
    finally:
        holder.reshard()


def _holds_parts(module: Any) -> bool:
    return hasattr(module, "unshard")
