"""Attention of rows behind a shared prefix, forward and back: whole score tensors, torch's kernels, and block by block;
and of rows that decode, with the prefix's keys and values arranged and as they are.

    python -m benchmarks.attention [--dtype float32 bfloat16] [--clock wall|processor]

Rows and prefix of a micro-batch of the shop, one layer of the embedded model; least milliseconds of five, each way in
its turn. All ways agree within rounding, which is checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.floor import CLOCKS, Clock
from models.local.attention import PrefixWeights, attend_decoding, attend_padded
from models.local.packed import can_arrange
from models.training.forward import attend_by_kernels, attend_plain

HEADS, GROUPS, DIM = 9, 3, 64
PREFIX, COUNTS = 761, (210, 190, 160, 150, 140, 120, 110, 90)

Attend = Callable[..., torch.Tensor]


def whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: tuple[int, ...], prefix: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """All weights of the padded rows at once."""
    width = max(counts)
    hidden = torch.full((width, width), float("-inf")).triu(1).to(q.dtype).expand(len(counts), -1, -1)
    q, k, v = (
        torch.stack([F.pad(row, (0, 0, 0, width - row.shape[1])) for row in x.split(counts, 1)]) for x in (q, k, v)
    )
    out = attend_padded(q, k, v, hidden, (prefix[0], prefix[1]))
    return torch.cat([row[:, :count] for row, count in zip(out, counts, strict=True)], dim=1)


WAYS: dict[str, Attend] = {"whole": whole, "kernels": attend_by_kernels, "blocks": attend_plain}


def milliseconds(dtype: torch.dtype, clock: Clock, repeats: int = 5) -> dict[str, tuple[float, float]]:
    """Of each way forward, and forward and back."""
    torch.manual_seed(0)
    sizes = ((HEADS, sum(COUNTS)), (GROUPS, sum(COUNTS)), (GROUPS, sum(COUNTS)), (GROUPS, PREFIX), (GROUPS, PREFIX))
    given = [(torch.randn(*size, DIM) * 0.3).to(dtype) for size in sizes]
    sent = torch.randn(HEADS, sum(COUNTS), DIM).to(dtype)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(repeats):
        for name, attend in WAYS.items():
            leaves = [x.clone().requires_grad_() for x in given]
            began = clock()
            out = attend(*leaves[:3], COUNTS, (leaves[3], leaves[4]))
            forward = clock() - began
            out.backward(sent)
            took[name].append((1e3 * forward, 1e3 * (clock() - began)))
            found[name] = [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]
    for name, tensors in found.items():
        for expected, tensor in zip(found["whole"], tensors, strict=True):
            assert (expected - tensor).norm() <= (1e-4 if dtype == torch.float32 else 0.03) * expected.norm(), name
    return {name: (min(f for f, _ in times), min(b for _, b in times)) for name, times in took.items()}


def decoding_microseconds(
    dtype: torch.dtype, rows: int, clock: Clock, repeats: int = 5, calls: int = 50
) -> dict[str, float]:
    """Of rows with one new token each and forty of their own, by how the prefix is held."""
    torch.manual_seed(0)
    (k, v), q = torch.randn(2, GROUPS, PREFIX, DIM).to(dtype), (torch.randn(rows, HEADS, DIM) * 0.1).to(dtype)
    own, hidden = torch.randn(2, rows, GROUPS, 40, DIM).to(dtype), torch.zeros(rows * GROUPS, 1, 40, dtype=dtype)
    ways = {"plain": PrefixWeights(k, v, arranged=False)}
    if can_arrange(k):
        ways["arranged"] = PrefixWeights(k, v, arranged=True)
    took: dict[str, float] = dict.fromkeys(ways, float("inf"))
    found: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for _ in range(repeats):
            for name, prefix in ways.items():
                began = clock()
                for _ in range(calls):
                    found[name] = attend_decoding(q, own[0], own[1], hidden, prefix)
                took[name] = min(took[name], 1e6 * (clock() - began) / calls)
    for tensor in found.values():
        assert torch.allclose(tensor.float(), found["plain"].float(), atol=1e-4 if dtype == torch.float32 else 0.05)
    return took


def figures() -> dict[str, float]:
    """For `make bench`."""
    found = milliseconds(torch.float32, CLOCKS["processor"])
    return {"attention: blocks / whole, forward and back": found["blocks"][1] / found["whole"][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    given = parser.parse_args()
    print(f"{len(COUNTS)} rows, {sum(COUNTS)} tokens, behind {PREFIX}; {torch.get_num_threads()} threads")
    for name in given.dtype:
        for way, (forward, both) in milliseconds(getattr(torch, name), CLOCKS[given.clock]).items():
            print(f"{name:9} {way:8} forward {forward:6.1f} ms, and back {both:6.1f} ms")
        for rows in (1, 3, 16, 48):
            took = decoding_microseconds(getattr(torch, name), rows, CLOCKS[given.clock])
            print(f"{name:9} {rows:2} rows decode: {', '.join(f'{way} {us:.0f} us' for way, us in took.items())}")


if __name__ == "__main__":
    main()
