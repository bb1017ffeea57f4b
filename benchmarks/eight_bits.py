"""What sampling with narrower weights gains, and what it costs: episodes of the shop with all linear layers in fp32 and
in 8 bits, in turns; without AVX-512, where products of 8 bits have no fast kernel, in fp32 and in fp32 read from fp16
(`models/local/packed.py`).

    python -m benchmarks.eight_bits [--episodes 96] [--rows 48] [--turns 2]

In 8 bits weights are rounded by output row, inputs by row at every call (LLM.int8, Dettmers et al., 2022, arXiv
2208.07339, without its outliers); products of integers are exact. Prints processor seconds and success of both sides,
and how far the log-probabilities of the base's own answers are from those of fp32, in nats. The sampler has no mode for
8 bits: it would have to be twice as fast.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.rollout import play
from models.episodes import Trajectory
from models.local.base import load_base
from models.local.decoder import FusedDecoder
from models.local.packed import Packed, arrange, halves


class EightBit:
    """A `Packed` in 8 bits, in its place; of the base alone."""

    def __init__(self, packed: Packed) -> None:
        whole = torch.cat(packed.bases)
        self.scale = step_of(whole)
        self.weight_t, self.bias = rounded(whole, self.scale).t().contiguous(), packed.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        step = step_of(x)
        y = torch._int_mm(rounded(x, step), self.weight_t).float().mul_(step).mul_(self.scale.t())
        return y if self.bias is None else y.add_(self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)


def step_of(x: torch.Tensor) -> torch.Tensor:
    """What a step of 8 bits is worth in each row, (N, 1)."""
    return x.abs().amax(1, keepdim=True).clamp_min_(1e-8).div_(127)


def rounded(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (x / step).round_().to(torch.int8)


def in_fp32(model: Any) -> Any:
    """The sampler's decoder with its linear layers in fp32."""
    decoder = FusedDecoder(model)
    for part in decoder.layers.values():
        part.packed.lay_out = arrange
    return decoder


def in_eight_bits(model: Any) -> Any:
    """The sampler's decoder with its linear layers in 8 bits."""
    decoder: Any = FusedDecoder(model)
    decoder._head = EightBit(decoder._head)
    for layer in decoder._stack:
        for name in ("qkv", "o", "gate", "up", "down"):
            object.__setattr__(layer, name, EightBit(getattr(layer, name)))
    return decoder


def scored(base: Any, played: Sequence[Trajectory], decoder: Any) -> torch.Tensor:
    """Log-probabilities of the last answers."""
    base.policy.decoder = decoder
    base.policy.free_buffers()
    found = []
    for trajectory in played:
        ids, sampled = trajectory.conversation.ids, trajectory.conversation.sampled
        count = len(sampled) - 1 - max(i for i, s in enumerate(sampled) if not s)
        if count:
            found += base.policy.score(list(ids), count)
    return torch.tensor(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    base = load_base(dtype="float32", rows=given.rows)
    model = base.policy.model
    other = {"from fp16": FusedDecoder(model)} if halves() else {"8 bits": in_eight_bits(model)}
    sides = {"fp32": in_fp32(model), **other}
    seconds: dict[str, float] = dict.fromkeys(sides, float("inf"))
    played: dict[str, list[Trajectory]] = {}
    for _ in range(given.turns):
        for name, decoder in sides.items():
            base.policy.decoder = decoder
            base.policy.free_buffers()
            took, _, played[name] = play(base, given.episodes, time.process_time, "validation")
            seconds[name] = min(seconds[name], took)
    for name, episodes in played.items():
        success = sum(t.score.success for t in episodes if t.score) / len(episodes)
        print(f"{name}: {seconds[name]:.1f} processor seconds, {100 * success:.1f} % of {len(episodes)} succeeded")
    full = scored(base, played["fp32"][:32], sides["fp32"])
    for name in list(sides)[1:]:
        apart = (scored(base, played["fp32"][:32], sides[name]) - full).abs()
        print(
            f"{name}: {seconds['fp32'] / seconds[name]:.2f} times as fast as fp32; {apart.mean():.1g} nats a token "
            f"apart in the mean, {apart.max():.1g} at most, of {len(apart)} tokens"
        )


if __name__ == "__main__":
    main()
