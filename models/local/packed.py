"""Linear layers for sampling: weights laid out once for the batch sizes of decoding, adapters merged in.

A decoding step multiplies each weight with few rows, where the plain CPU kernel is two to three times slower than
one on a pre-arranged weight (`benchmarks/rollout.py`). The sampler therefore runs a twin of the model that shares
every parameter but holds arranged copies of its linear weights; an adapter is merged into the copies of the layers
that it touches, so sampling with an adapter costs what sampling without one costs, and the base stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Rows that the arrangement is tuned for; any other number works.
TUNED_ROWS = 48


def can_arrange(weight: torch.Tensor) -> bool:
    """Whether oneDNN's arranged kernels exist for this weight (CPU, fp32 or bf16)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class PackedLinear(nn.Module):
    """y = x W^T + b with W of shape (out, in), arranged where the machine can, plus a merged adapter delta."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.base, self.bias = weight, bias
        self.packed: torch.Tensor
        self.arranged = can_arrange(weight)
        self.merge(None)

    def merge(self, delta: torch.Tensor | None) -> None:
        """Use base + delta (out, in) from now on; None is the base alone."""
        weight = self.base if delta is None else self.base + delta.to(self.base.dtype)
        self.packed = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TUNED_ROWS) if self.arranged else weight
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.arranged:
            return F.linear(x, self.packed, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.reshape(-1, x.shape[-1]), self.packed, self.bias, "none", [], ""
        )
        return y.view(*x.shape[:-1], y.shape[-1])


class SamplerTwin:
    """A twin of `model` for sampling. Parameters are shared; linear layers are `PackedLinear`."""

    def __init__(self, model: nn.Module) -> None:
        shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
        self.model: Any = copy.deepcopy(model, dict(shared)).eval()
        self.layers: dict[str, PackedLinear] = {}
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear):
                packed = PackedLinear(module.weight.detach(), module.bias)
                parent, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, packed)
                self.layers[name] = packed
        self._merged: set[str] = set()

    def merge(self, deltas: Mapping[str, torch.Tensor]) -> None:
        """Merge `deltas` (module name -> (out, in)); layers merged before and not named now go back to the base."""
        for name in self._merged - deltas.keys():
            self.layers[name].merge(None)
        for name, delta in deltas.items():
            self.layers[name].merge(delta)
        self._merged = set(deltas)
