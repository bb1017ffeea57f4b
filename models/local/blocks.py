"""Exact attention on a CPU, a block of scores at a time, with a gradient.

A block is small enough for a core's own cache: scores, softmax and the product with the values meet in it, and no
layer's weights are ever held whole. The backward pass computes a block's weights again (as FlashAttention does, Dao
et al. 2022, arXiv 2205.14135); what is kept is what went in. On shapes of the embedded model this takes a third of the
time of whole score tensors in fp32 and two thirds in bf16 (`benchmarks/findings/speed.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

# Scores of a block: a megabyte in bf16, two in fp32. Half and double as many were no faster.
BLOCK = 2**19
# Queries of a block at least: fewer make matrix products that a core is slow at.
LEAST = 16


# First and last (excluded) of tokens that lie together.
Piece = tuple[int, int]


@dataclass(frozen=True)
class Own:
    """Where a row's queries lie among all, and its own keys and values (Hkv, T, D): the last ones are the queries'.
    `pieces`, which a gradient needs, say where the keys lie among all."""

    first: int
    last: int
    keys: torch.Tensor
    values: torch.Tensor
    pieces: tuple[Piece, ...] = ()


Prefix = tuple[torch.Tensor, torch.Tensor]


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: Sequence[int],
    prefix: Prefix | None,
    after: Sequence[tuple[Piece, ...]] | None = None,
) -> torch.Tensor:
    """Grouped-query attention of rows that lie one after the other.

    q (H, N, D), already scaled, k and v (Hkv, N, D), of rows with `counts` tokens, each of which sees itself and those
    before it in its row; prefix keys and values (Hkv, P, D), seen by all. A row may go on from pieces of earlier rows,
    `after`, which all its tokens see. Returns (H, N, D).
    """
    empty = v.new_zeros(len(v), 0, v.shape[2])
    # Autocast leaves keys and values of one layer in different dtypes, and reaches no product below.
    parts = (x.to(v.dtype).contiguous() for x in (q, k, v, *(prefix or (empty, empty))))
    out: torch.Tensor = _Attention.apply(*parts, pieces_of(counts, after))
    return out


def pieces_of(counts: Sequence[int], after: Sequence[tuple[Piece, ...]] | None) -> list[tuple[Piece, ...]]:
    """Where the keys of each row lie: what it goes on from, and its own tokens as the last piece."""
    ends = list(accumulate(counts))
    own = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [(*seen, mine) for seen, mine in zip(after or [()] * len(own), own, strict=True)]


def attend_seen(q: torch.Tensor, rows: Sequence[Own], prefix: Prefix | None) -> torch.Tensor:
    """`attend_rows` without a gradient, of rows that also see what was there before their queries."""
    q = q.contiguous()
    out = torch.empty_like(q)
    for block in _blocks(q, rows, prefix):
        weights = block.weights()
        mixed = weights[:, block.before :] @ block.values
        if block.seen is not None:
            mixed.addmm_(weights[:, : block.before], block.seen[1])
        out[block.heads, block.first : block.last] = mixed.view(-1, block.last - block.first, q.shape[2])
    return out


@dataclass(frozen=True)
class _Block:
    """Queries `first` to `last` of the heads that share a key-value head, and what they see: `seen` is the prefix of
    `before` tokens; keys and values (T, D) are the row's own up to the last query's."""

    heads: slice
    group: int
    row: Own
    first: int
    last: int
    queries: torch.Tensor
    seen: Prefix | None
    before: int
    keys: torch.Tensor
    values: torch.Tensor

    def weights(self) -> torch.Tensor:
        """(queries of all its heads, before + T)."""
        scores = self.queries.new_empty(len(self.queries), self.before + len(self.keys))
        if self.seen is not None:
            torch.mm(self.queries, self.seen[0].t(), out=scores[:, : self.before])
        torch.mm(self.queries, self.keys.t(), out=scores[:, self.before :])
        count = self.last - self.first
        last = scores.view(-1, count, scores.shape[1])[:, :, -count:]
        last.masked_fill_(_later(count, scores.device), float("-inf"))
        return torch.softmax(scores, dim=-1)


@lru_cache(maxsize=64)
def _later(count: int, device: torch.device) -> torch.Tensor:
    """Of `count` tokens in a row, those that come after each, (count, count): asked for once a layer and row."""
    with torch.inference_mode(False):
        return torch.ones(count, count, dtype=torch.bool, device=device).triu_(1)


def _blocks(q: torch.Tensor, rows: Sequence[Own], prefix: Prefix | None) -> Iterator[_Block]:
    before = prefix[0].shape[1] if prefix else 0
    each = len(q) // len(rows[0].keys)
    for row in rows:
        held = row.keys.shape[1] - (row.last - row.first)  # own tokens before the first query
        step = max(LEAST, BLOCK // (each * (before + row.keys.shape[1])))
        for first in range(row.first, row.last, step):
            last = min(first + step, row.last)
            end = held + last - row.first
            for group in range(len(row.keys)):
                heads = slice(group * each, (group + 1) * each)
                yield _Block(
                    heads,
                    group,
                    row,
                    first,
                    last,
                    q[heads, first:last].reshape(-1, q.shape[2]),
                    (prefix[0][group], prefix[1][group]) if prefix and before else None,
                    before,
                    row.keys[group, :end],
                    row.values[group, :end],
                )


def put_together(x: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """The pieces of x (H, N, D), one after the other, (H, T, D)."""
    parts = [x[:, first:last] for first, last in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rows(k: torch.Tensor, v: torch.Tensor, rows: Sequence[tuple[Piece, ...]]) -> list[Own]:
    return [Own(*pieces[-1], put_together(k, pieces), put_together(v, pieces), pieces) for pieces in rows]


def _add(total: torch.Tensor, block: _Block, sent: torch.Tensor) -> None:
    """Add what a block sends to its own keys, or values, (T, D), where they lie in `total` (N, D)."""
    at = 0
    for first, last in block.row.pieces:
        last = min(last, block.last)
        total[first:last] += sent[at : at + last - first]
        at += last - first


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pk: torch.Tensor,
        pv: torch.Tensor,
        rows: Sequence[tuple[Piece, ...]],
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, pk, pv)
        ctx.rows = rows
        return attend_seen(q, _rows(k, v, rows), (pk, pv))

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        q, k, v, pk, pv = ctx.saved_tensors
        dout = given[0].contiguous()
        # Sums over many blocks: in bf16 what a block adds would be lost beside them.
        dq = torch.empty_like(q)
        dk, dv, dpk, dpv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v, pk, pv))
        for block in _blocks(q, _rows(k, v, ctx.rows), (pk, pv)):
            sent = dout[block.heads, block.first : block.last].reshape(-1, q.shape[2])
            weights = block.weights()
            slopes = torch.empty_like(weights)
            split, group = block.before, block.group
            _add(dv[group], block, weights[:, split:].t() @ sent)
            torch.mm(sent, block.values.t(), out=slopes[:, split:])
            if block.seen is not None:
                dpv[group] += weights[:, :split].t() @ sent
                torch.mm(sent, block.seen[1].t(), out=slopes[:, :split])
            slopes = torch._softmax_backward_data(slopes, weights, -1, weights.dtype)
            mine = slopes[:, split:] @ block.keys
            _add(dk[group], block, slopes[:, split:].t() @ block.queries)
            if block.seen is not None:
                mine.addmm_(slopes[:, :split], block.seen[0])
                dpk[group] += slopes[:, :split].t() @ block.queries
            dq[block.heads, block.first : block.last] = mine.view(-1, block.last - block.first, q.shape[2])
        return dq, *(x.to(q.dtype) for x in (dk, dv, dpk, dpv)), None
