"""The arithmetic floor: what the matrix products of a piece of work alone would take on this machine.

    python -m benchmarks.floor [--rows 48] [--clock wall|processor]

Random weights of the model's shapes, one set per layer so that no cache holds them, are multiplied with 1 to 1,024 rows
in fp32, bf16 and int8 (dynamic), plain and arranged and with fp32 read from fp16 where this machine does so
(`models/local/packed.py`), q, k, v and gate, up apart or stacked; the fastest of all counts; so are attention's two
products, of the queries of all rows with the keys and values of a prefix of 768 tokens, four of the kind on the way
back. The floor of a piece of work is then the time of the linear layers, the head and attention's products for exactly
the tokens that were computed and what they attend to (`models/work.py`): decoded tokens at the rate of a full batch
(`--rows`), so that tails count against whoever leaves them; all others at the rate of 256 rows. Adapters and everything
that is no matrix product are above the floor
by definition. `Floor.linear` leaves attention out, as all figures did that are older than it.

`--clock processor` takes processor time, for one thread on a machine that others use meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from models.local.packed import Packed, arrange, can_arrange, halves
from models.work import Work

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
WIDE = 256
# Tokens that attention's products see.
SEEN = 768


@dataclass(frozen=True)
class Shapes:
    """What decides the products of a model: (out, in) of a layer's matrices, apart and stacked, and of the head;
    attention's key-value heads, the query heads of each, and their width."""

    layers: int
    apart: tuple[tuple[int, int], ...]
    stacked: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    groups: int
    each: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> Shapes:
        """Of a Llama's configuration."""
        hidden, inner = config.hidden_size, config.intermediate_size
        dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        ends = ((hidden, q), (hidden, inner))
        return cls(
            config.num_hidden_layers,
            ((q, hidden), (kv, hidden), (kv, hidden), (inner, hidden), (inner, hidden), *ends),
            ((q + 2 * kv, hidden), (2 * inner, hidden), *ends),
            (config.vocab_size, hidden),
            config.num_key_value_heads,
            config.num_attention_heads // config.num_key_value_heads,
            dim,
        )


@dataclass(frozen=True)
class Floor:
    """Seconds per token on this machine: through all layers when decoding and when many tokens are computed, back
    through all layers, and through the head forward and back. `seen_...`: seconds of attention's products in all layers
    per token that one sees."""

    dtype: str
    decoded: float
    wide: float
    back: float
    head: float
    head_wide: float
    head_back: float
    seen_decoded: float
    seen_wide: float
    seen_back: float
    layers: int

    def seconds(self, work: Work) -> float:
        """The floor of `work`."""
        return (
            self.linear(work)
            + work.seen_decoding * self.seen_decoded
            + work.seen_prefilling * self.seen_wide
            + work.seen_forward / self.layers * self.seen_wide
            + work.seen_backward / self.layers * self.seen_back
        )

    def linear(self, work: Work) -> float:
        """The floor of its linear layers and the head alone."""
        return (
            work.decoded * self.decoded
            + work.prefilled * self.wide
            + work.heads * self.head
            + work.trained_forward / self.layers * self.wide
            + work.trained_backward / self.layers * self.back
            + work.trained_heads * (self.head_wide + self.head_back)
        )


def best(work: Callable[[], object], clock: Clock, repeats: int = 5) -> float:
    """Least seconds of a call."""
    found = []
    for _ in range(repeats + 1):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found[1:])


def _product(weight: torch.Tensor, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if way == "plain":
        return lambda x: F.linear(x, weight)
    if way == "int8":
        return _int8(weight)
    packed = Packed([SimpleNamespace(weight=weight)])
    if way == "arranged":
        packed.lay_out = arrange
    return packed


def _int8(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Weights in 8 bits by output row, activations quantized at every call."""
    scale = weight.abs().amax(dim=1).double() / 127
    zero = torch.zeros(len(weight), dtype=torch.int64)
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8), None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False)


@torch.inference_mode()
def products(shapes: tuple[tuple[int, int], ...], copies: int, rows: int, kind: str, clock: Clock) -> dict[str, float]:
    """Seconds of `copies` times the products of `shapes` with `rows` rows, by arrangement; `kind` is a dtype's name."""
    dtype = torch.float32 if kind == "int8" else getattr(torch, kind)
    inputs = {width: torch.randn(rows, width).to(dtype) for _, width in shapes}
    # Of bf16's numbers, as a published base's are: fp16 holds them.
    weights = [torch.randn(shape).bfloat16().to(dtype) for _ in range(copies) for shape in shapes]
    found = {}
    ways = ["int8"] if kind == "int8" else ["plain", *(["arranged"] if can_arrange(weights[0]) else [])]
    if kind == "float32" and halves():
        ways.append("from fp16")
    for way in ways:
        calls = [(_product(w, way), inputs[w.shape[1]]) for w in weights]
        found[way] = best(lambda calls=calls: [call(x) for call, x in calls], clock)  # type: ignore[misc]
    return found


@torch.inference_mode()
def attending(shapes: Shapes, rows: int, kind: str, clock: Clock, back: bool = False) -> float:
    """Least seconds of attention's products in one layer, of one new token of each of `rows` rows with `SEEN` tokens;
    `back`: of those that its gradient needs (of values, weights, queries and keys)."""
    dtype = getattr(torch, kind)
    q = [torch.randn(rows * shapes.each, shapes.dim).to(dtype) for _ in range(shapes.groups)]
    w = [torch.randn(rows * shapes.each, SEEN).to(dtype) for _ in range(shapes.groups)]
    k, v = ([torch.randn(SEEN, shapes.dim).to(dtype) for _ in range(shapes.groups)] for _ in range(2))

    def turned() -> None:
        for queries, weights, keys, values in zip(q, w, k, v, strict=True):
            weights.t() @ queries
            queries @ values.t()
            weights @ keys
            weights.t() @ queries

    if back:
        return best(turned, clock)
    found = [best(lambda: [(x @ y.t(), u @ z) for x, y, u, z in zip(q, k, w, v, strict=True)], clock)]
    if can_arrange(k[0]):
        calls = [(_product(y, "arranged"), x) for x, y in zip(q, k, strict=True)]
        calls += [(_product(z.t().contiguous(), "arranged"), u) for u, z in zip(w, v, strict=True)]
        found.append(best(lambda: [call(x) for call, x in calls], clock))
    return min(found)


def _least(shapes: Shapes, rows: int, kind: str, clock: Clock, turned: bool = False) -> float:
    """Least seconds of all layers with `rows` rows, over all arrangements; `turned`: y W instead of x W^T."""
    sets = [shapes.apart, shapes.stacked]
    if turned:
        sets = [tuple((i, o) for o, i in s) for s in sets]
    return min(min(products(s, shapes.layers, rows, kind, clock).values()) for s in sets)


def measure(config: Any, dtype: torch.dtype, rows: int = 48, clock: Clock = time.perf_counter) -> Floor:
    """The floor of a model in `dtype` with `rows` rows in flight, on the threads that torch has now."""
    shapes, kind = Shapes.of(config), str(dtype).removeprefix("torch.")
    head, turned = (shapes.head,), (shapes.head[::-1],)

    def seen(count: int, back: bool) -> float:
        return attending(shapes, count, kind, clock, back) * shapes.layers / (count * SEEN)

    return Floor(
        kind,
        _least(shapes, rows, kind, clock) / rows,
        _least(shapes, WIDE, kind, clock) / WIDE,
        _least(shapes, WIDE, kind, clock, turned=True) / WIDE,
        min(products(head, 1, rows, kind, clock).values()) / rows,
        min(products(head, 1, WIDE, kind, clock).values()) / WIDE,
        min(products(turned, 1, WIDE, kind, clock).values()) / WIDE,
        seen(rows, False),
        seen(WIDE, False),
        seen(WIDE, True),
        shapes.layers,
    )


def main() -> None:
    from transformers import AutoConfig

    from models.local.base import embedded_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    given = parser.parse_args()
    clock = CLOCKS[given.clock]
    config = AutoConfig.from_pretrained(embedded_folder())
    shapes = Shapes.of(config)
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {given.clock} time")
    print(f"{'':9} {'rows':>5}  ms of all linear layers, by arrangement; of the head; tokens/s of the fastest")
    for kind in ("float32", "bfloat16", "int8"):
        for rows in sorted({1, 16, given.rows, WIDE, 1024}):
            apart, stacked = (products(s, shapes.layers, rows, kind, clock) for s in (shapes.apart, shapes.stacked))
            ways = {**{f"{n} apart": s for n, s in apart.items()}, **{f"{n} stacked": s for n, s in stacked.items()}}
            head = min(products((shapes.head,), 1, rows, kind, clock).values())
            told = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in ways.items())
            rate = rows / (min(ways.values()) + head)
            print(f"{kind:9} {rows:5}  {told}; {1e3 * head:.1f}; {rate:.0f}", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        floor = measure(config, dtype, given.rows, clock)
        print(
            f"{floor.dtype}: us a token: decoded {1e6 * (floor.decoded + floor.head):.0f} (its head "
            f"{1e6 * floor.head:.0f}), prefilled {1e6 * floor.wide:.0f}, back through all layers "
            f"{1e6 * floor.back:.0f}, head forward and back {1e6 * (floor.head_wide + floor.head_back):.0f}; "
            f"attending to {SEEN} tokens {1e6 * SEEN * floor.seen_decoded:.0f}, "
            f"{1e6 * SEEN * floor.seen_wide:.0f} and back {1e6 * SEEN * floor.seen_back:.0f}"
        )


if __name__ == "__main__":
    main()
