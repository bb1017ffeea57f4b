"""Linear layers for sampling: weights laid out once for the batch sizes of decoding, with an adapter in them.

A decoding step multiplies each weight with few rows, where the plain CPU kernel is two to three times slower than
one on a pre-arranged weight (`benchmarks/floor.py`). The sampler therefore holds arranged copies of the linear
weights, and the base stays as it was. Layers that read the same input may be arranged as one.

Few rows wait for the weights to be read. Where a processor has no AVX-512, a weight in fp32 whose numbers fp16 holds is
therefore read from fp16, half as many bytes, and widened on the way: the product is that of fp32 but for the order in
which it adds up. A base that was published in bf16, as most are, has such weights; one that an adapter is merged into
has not.

An adapter is merged into the copies of the layers that it touches where weights are in fp32: sampling with it costs
what sampling without it costs. A narrower weight has no digits for it: in bf16 most of what a first step at a small
rate has learnt is below half a unit in the last place, and would be rounded away. There B stands beside the copy as
further columns, and what A makes of the input beside the input: one product, which adds up in fp32 and rounds once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.adapters.deltas import Delta

# Rows that the arrangement is tuned for; any other number works.
TUNED_ROWS = 48
# The most that a number may move for fp16 to hold it: half of its last digit below 2^-14, where it has fewer digits. Of
# the numbers of bf16 only those below 2^-17 move at all.
HELD = 2.0**-25
# FBGEMM takes so many rows at a time on AVX2. One or two that are left over are added up in another order, so a third
# is put beside them: what a row comes to must not depend on which others are in flight.
BLOCK = 6
# Columns beside a weight come in so many: a GPU's fast kernels want rows of a multiple of 16 bytes.
COLUMNS = 16


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


@cache
def halves() -> bool:
    """Whether fp32 is multiplied with weights in fp16 here: by FBGEMM's kernels for AVX2; no others were measured."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(16, 16), None)
    except (RuntimeError, AttributeError):  # another engine was chosen; a torch that has dropped it
        return False
    return True


def halved(weight: torch.Tensor) -> torch.ScriptObject | None:
    """An arranged copy of `weight` (out, in) in fp16 for `linear_dynamic_fp16`; None where fp16 does not hold it."""
    if weight.dtype != torch.float32 or not halves():
        return None
    if not bool(weight.half().float().sub_(weight).abs_().max() <= HELD):  # nor where one of them is no number
        return None
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)
    return packed


def lay_out(weight: torch.Tensor) -> torch.Tensor | torch.ScriptObject:
    """The copy of `weight` (out, in) whose product is the fastest here."""
    half = halved(weight)
    return arrange(weight) if half is None else half


class Packed:
    """y = x W^T + b, W of shape (out, in) or several stacked, arranged where the machine can, with deltas.

    It is arranged when it is first used after a change. The fused forms round once: `y` is not stored in between.
    `deltas` are those of the stacked weights, by index.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self.bases: list[torch.Tensor] = [module.weight.detach() for module in modules]
        biases = [b.detach() for b in (getattr(module, "bias", None) for module in modules) if b is not None]
        self.bias = torch.cat(biases) if biases else None  # of layers that read the same input, all have one or none
        self.arranged = can_arrange(self.bases[0])
        self.lay_out: Callable[[torch.Tensor], torch.Tensor | torch.ScriptObject] = lay_out
        self.merges = self.bases[0].dtype.itemsize >= 4  # else deltas stand beside the weight
        self.deltas: dict[int, Delta] = {}
        self.bare = False  # whether the deltas are left out for now
        self._weight: torch.Tensor | torch.ScriptObject | None = None
        self._half: torch.ScriptObject | None = None  # the base in fp16: kept, as it takes longer to make than to keep
        self._down: torch.Tensor | None = None  # the A of deltas that stand beside the weight, arranged as it is

    def merge(self, part: int, delta: Delta | None) -> None:
        """Use base + delta (out, in) for one of the stacked weights from now on; None is the base alone."""
        if delta is not None:
            self.deltas[part] = delta
        elif self.deltas.pop(part, None) is None:
            return
        self._weight = self._down = None

    @property
    def weight(self) -> torch.Tensor | torch.ScriptObject:
        """What a product takes, (out, in), or (out, in + columns) with deltas that are not merged (`_sides`)."""
        if self._half is not None and (self.bare or not self.deltas):
            return self._half
        if self.bare and self.deltas:  # as the model has it: the same kernels take it, slower
            return torch.cat(self.bases) if len(self.bases) > 1 else self.bases[0]
        if self._weight is None:
            made = list(self.bases)
            if self.merges:
                for i, delta in self.deltas.items():
                    made[i] = made[i] + delta.whole(made[i].device).to(made[i])
            whole = torch.cat(made) if len(made) > 1 else made[0]
            if self.deltas and not self.merges:
                up, down = self._columns(whole)
                whole, self._down = torch.cat([whole, up], dim=1), arrange(down) if self.arranged else down
            if not self.arranged:
                self._weight = whole
            elif self.deltas:  # merged: numbers that fp16 does not hold, and to find that out takes time
                self._weight = arrange(whole)
            else:
                self._weight = self.lay_out(whole)
                self._half = self._weight if isinstance(self._weight, torch.ScriptObject) else None
        return self._weight

    def _columns(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scaled B of all deltas (out, columns), each in the rows of its weight, and their A (columns, in)."""
        columns = -(-sum(len(delta.a) for delta in self.deltas.values()) // COLUMNS) * COLUMNS
        up, down = like.new_zeros(len(like), columns), like.new_zeros(columns, like.shape[1])
        row = column = 0
        for i, base in enumerate(self.bases):
            if delta := self.deltas.get(i):
                last = column + len(delta.a)
                down[column:last] = delta.a
                up[row : row + len(base), column:last] = delta.scaling * delta.b.float()
                column = last
            row += len(base)
        return up, down

    def _sides(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | torch.ScriptObject]:
        """What is multiplied: x (N, in), with what the deltas' A make of it behind it, and the weight."""
        weight = self.weight
        if self.bare or self._down is None:
            return x, weight
        return torch.cat([x, self._product(x, self._down)], dim=1), weight

    def _fuses(self, weight: torch.Tensor | torch.ScriptObject) -> bool:
        """Whether the product with it has forms that do more than the product."""
        return self.arranged and isinstance(weight, torch.Tensor)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor | torch.ScriptObject, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, torch.ScriptObject):
            rows = len(x)
            if 0 < rows % BLOCK < 3:
                x = F.pad(x, (0, 0, 0, 3 - rows % BLOCK))
            y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, weight)[:rows]
            return y if bias is None else y.add_(bias)
        if not self.arranged:
            return F.linear(x, weight, bias)
        arranged: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return arranged

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, in) -> (N, out)."""
        return self._product(*self._sides(x), self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(y)."""
        x, weight = self._sides(x)
        if not self._fuses(weight):
            return F.silu(self._product(x, weight, self.bias), inplace=True)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, "swish", [], "")
        return y

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """y * other, which has the shape of y."""
        return self._with(x, other, "mul")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """y + other, which has the shape of y."""
        return self._with(x, other, "add")

    def _with(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        x, weight = self._sides(x)
        if not self._fuses(weight):
            alone = self._product(x, weight, self.bias)
            return alone * other if how == "mul" else alone + other
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, self.bias, how)
        return y


class Part:
    """One layer of the model among those that are arranged as one."""

    def __init__(self, packed: Packed, index: int) -> None:
        self.packed, self.index = packed, index

    @property
    def base(self) -> torch.Tensor:
        """The layer's own weight (out, in), never changed here."""
        return self.packed.bases[self.index]

    def merge(self, delta: Delta | None) -> None:
        self.packed.merge(self.index, delta)


def merge(layers: Mapping[str, Part], merged: set[str], deltas: Mapping[str, Delta]) -> set[str]:
    """Merge `deltas` (by module name), or put them beside the weights; layers that had one before (`merged`) and are
    not named now go back to the base. Returns the names of those that have one now."""
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
