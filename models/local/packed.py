"""Linear layers for sampling: weights laid out once for the batch sizes of decoding, adapters merged in.

A decoding step multiplies each weight with few rows, where the plain CPU kernel is two to three times slower than
one on a pre-arranged weight (`benchmarks/floor.py`). The sampler therefore holds arranged copies of the linear
weights; an adapter is merged into the copies of the layers that it touches, so sampling with an adapter costs what
sampling without one costs, and the base stays as it was. Layers that read the same input may be arranged as one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Rows that the arrangement is tuned for; any other number works.
TUNED_ROWS = 48


def can_arrange(weight: torch.Tensor) -> bool:
    """Whether oneDNN's arranged kernels exist for this weight (CPU, fp32 or bf16) on this processor."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and kernels(weight.dtype)


@cache
def kernels(dtype: torch.dtype) -> bool:
    """Found by trying: nothing says beforehand what a processor lacks (for bf16 AVX-512, or AVX-NE-CONVERT)."""
    try:
        arrange(torch.zeros(16, 16, dtype=dtype))
    except (RuntimeError, AttributeError):  # refused on this processor; a build of torch without oneDNN
        return False
    return torch.backends.mkldnn.is_available()


def arrange(weight: torch.Tensor) -> torch.Tensor:
    """An arranged copy of `weight` (out, in) for `_linear_pointwise`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TUNED_ROWS)
    return packed


class Packed:
    """y = x W^T + b, W of shape (out, in) or several stacked, arranged where the machine can, with merged deltas.

    It is arranged when it is first used after a change. The fused forms round once: `y` is not stored in between.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self.bases: list[torch.Tensor] = [module.weight.detach() for module in modules]
        biases = [b.detach() for b in (getattr(module, "bias", None) for module in modules) if b is not None]
        self.bias = torch.cat(biases) if biases else None  # of layers that read the same input, all have one or none
        self.arranged = can_arrange(self.bases[0])
        self.deltas: dict[int, torch.Tensor] = {}
        self.bare = False  # whether the merged deltas are left out for now
        self._weight: torch.Tensor | None = None

    def merge(self, part: int, delta: torch.Tensor | None) -> None:
        """Use base + delta (out, in) for one of the stacked weights from now on; None is the base alone."""
        if delta is not None:
            self.deltas[part] = delta
        elif self.deltas.pop(part, None) is None:
            return
        self._weight = None

    @property
    def weight(self) -> torch.Tensor:
        if self.bare and self.deltas:  # as the model has it: the same kernels take it, slower
            return torch.cat(self.bases) if len(self.bases) > 1 else self.bases[0]
        if self._weight is None:
            made = [w + self.deltas[i].to(w) if i in self.deltas else w for i, w in enumerate(self.bases)]
            whole = torch.cat(made) if len(made) > 1 else made[0]
            self._weight = arrange(whole) if self.arranged else whole
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, in) -> (N, out)."""
        if not self.arranged:
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(y)."""
        if not self.arranged:
            return F.silu(self(x))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return y

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """y * other, which has the shape of y."""
        return self._with(x, other, "mul") if self.arranged else self(x) * other

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """y + other, which has the shape of y."""
        return self._with(x, other, "add") if self.arranged else self(x) + other

    def _with(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, how)
        return y


class Part:
    """One layer of the model among those that are arranged as one."""

    def __init__(self, packed: Packed, index: int) -> None:
        self.packed, self.index = packed, index

    @property
    def base(self) -> torch.Tensor:
        """The layer's own weight (out, in), never changed here."""
        return self.packed.bases[self.index]

    def merge(self, delta: torch.Tensor | None) -> None:
        self.packed.merge(self.index, delta)


def merge(layers: Mapping[str, Part], merged: set[str], deltas: Mapping[str, torch.Tensor]) -> set[str]:
    """Merge `deltas` (module name -> (out, in)); layers `merged` before and not named now go back to the base.
    Returns what is merged now."""
    for name in merged - deltas.keys():
        layers[name].merge(None)
    for name, delta in deltas.items():
        layers[name].merge(delta)
    return set(deltas)


@contextmanager
def base_alone(layers: Mapping[str, Part], merged: Iterable[str]) -> Iterator[None]:
    """The base within: what is merged stays arranged and is left out, which costs less than to arrange it twice."""
    for name in merged:
        layers[name].packed.bare = True
    try:
        yield
    finally:
        for name in merged:
            layers[name].packed.bare = False


class PackedLinear(nn.Module):
    """A `Packed` in the place of a model's linear layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.packed = Packed([module])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.packed(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


def packed_twin(model: nn.Module) -> tuple[Any, dict[str, Part]]:
    """A twin of `model` for sampling, and its linear layers by name. Parameters are shared; linear layers are
    `PackedLinear`. For models whose layers `models/local/decoder.py` does not know."""
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    twin: Any = copy.deepcopy(model, dict(shared)).eval()
    layers: dict[str, Part] = {}
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.Linear):
            linear = PackedLinear(module)
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, linear)
            layers[name] = Part(linear.packed, 0)
    return twin, layers
