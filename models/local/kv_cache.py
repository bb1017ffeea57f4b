"""Keys and values of sampling: one store for all rows, and the passes that fill it and attend to it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from models.local.attention import attend_padded
from models.policy import Request

# Queries of a shared prefix that are attended to at once: bounds the memory of their scores.
QUERIES_AT_ONCE = 512


class KeyValueCache:
    """Keys and values of all rows: per layer (slots, Hkv, T, D), slot by slot; grows in T."""

    def __init__(self, config: object, slots: int, like: torch.Tensor) -> None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads  # type: ignore[attr-defined]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads  # type: ignore[attr-defined]
        self.layers, self.shape = config.num_hidden_layers, (slots, heads, 0, dim)  # type: ignore[attr-defined]
        self.like = like
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.room = 0

    def reserve(self, length: int, used: Sequence[int] = ()) -> None:
        """Make room for `length` tokens per row. `used` are the tokens that the first slots hold; the others hold none.

        Only what is used is copied: memory that was never written costs nothing on a CPU, so that a few long episodes
        do not pay for all slots."""
        if length <= self.room:
            return
        slots, heads, _, dim = self.shape
        room = max(64, -(-length * 3 // 2 // 32) * 32)
        grown: list[list[torch.Tensor]] = []
        for old in (self.k, self.v):
            fresh = [_zeros(self.like, (slots, heads, room, dim)) for _ in range(self.layers)]
            for new, prior in zip(fresh, old, strict=False):
                for slot, held in enumerate(used):
                    new[slot, :, :held] = prior[slot, :, :held]
            grown.append(fresh)
        (self.k, self.v), self.room = grown, room

    def clear(self) -> None:
        """Drop all buffers."""
        self.k, self.v, self.room = [], [], 0

    def copy(self, source: int, destination: int, length: int) -> None:
        """Overwrite one slot by another."""
        for buffer in (*self.k, *self.v):
            buffer[destination, :, :length] = buffer[source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange two slots."""
        for buffer in (*self.k, *self.v):
            held = buffer[a, :, :length].clone()
            buffer[a, :, :length] = buffer[b, :, :length]
            buffer[b, :, :length] = held


def _zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros, not empty memory: a masked weight of 0 times a stray NaN would still be NaN. On a CPU they are pages that
    the system gives when they are written (`torch.zeros` writes them all at once)."""
    size = math.prod(shape)
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    return torch.frombuffer(mmap.mmap(-1, size * like.element_size()), dtype=like.dtype, count=size).view(shape)


class PrefixPass:
    """Forward pass of one sequence whose keys and values become a shared prefix."""

    def __init__(self) -> None:
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        self.k.append(k.contiguous())
        self.v.append(v.contiguous())
        n, parts = q.shape[1], []
        # In blocks of queries: the scores of a prefix of 6,000 tokens at once would take gigabytes.
        for start in range(0, n, QUERIES_AT_ONCE):
            end = min(n, start + QUERIES_AT_ONCE)
            hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(1 + start)[None]
            part = q[None, :, start:end], k[None, :, :end], v[None, :, :end]
            parts.append(attend_padded(*part, hidden, None, scaling)[0])
        return torch.cat(parts, dim=1).transpose(0, 1)


class RowsPass:
    """Forward pass of new tokens of several rows, laid flat. Stores their keys and values, then attends.

    `slots` (R,) rows of the cache, `starts` tokens stored per row, `counts` new tokens per row.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        prefix: PrefixPass | None,
    ) -> None:
        self.cache, self.prefix = cache, prefix
        device = cache.like.device
        count, start = torch.tensor(counts), torch.tensor(starts)
        self.rows, self.width = len(slots), int(count.max())
        self.total = int((start + count).max())
        self.contiguous = list(slots) == list(range(len(slots)))
        slot = torch.tensor(slots)
        row = torch.repeat_interleave(torch.arange(self.rows), count)
        within = torch.arange(int(count.sum())) - torch.repeat_interleave(torch.cumsum(count, 0) - count, count)
        self.slot_of, self.at = slot[row].to(device), (start[row] + within).to(device)
        self.flat = (row * self.width + within).to(device)
        self.slots = slot.to(device)
        reach = start[:, None] + torch.arange(self.width)[None, :]  # last key that query (row, j) may see
        self.hidden = (torch.arange(self.total)[None, None, :] > reach[:, :, None]).to(device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys[self.slot_of, :, self.at] = k.transpose(0, 1)
        values[self.slot_of, :, self.at] = v.transpose(0, 1)
        if self.contiguous:
            keys, values = keys[: self.rows, :, : self.total], values[: self.rows, :, : self.total]
        else:
            keys, values = keys[self.slots, :, : self.total], values[self.slots, :, : self.total]
        heads, _, dim = q.shape
        if self.width == 1:
            padded = q.transpose(0, 1).unsqueeze(2)
        else:
            padded = q.new_zeros(self.rows * self.width, heads, dim)
            padded[self.flat] = q.transpose(0, 1)
            padded = padded.view(self.rows, self.width, heads, dim).transpose(1, 2)
        prefix = (self.prefix.k[layer], self.prefix.v[layer]) if self.prefix else None
        out = attend_padded(padded, keys, values, self.hidden, prefix, scaling)
        if self.width == 1:
            return out.squeeze(2)
        return out.transpose(1, 2).reshape(self.rows * self.width, heads, dim)[self.flat]


@dataclass
class Row:
    """A session's place in the batch. `ids` are the tokens after the prefix whose keys and values are stored."""

    session: str
    adapter: str | None
    prefix: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    request: Request | None = None
    draws: np.random.Generator | None = None
