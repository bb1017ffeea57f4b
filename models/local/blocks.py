"""Exact attention on a CPU, a block of scores at a time, with a gradient.

A block is small enough for a core's own cache: scores, softmax and the product with the values meet in it, and no
layer's weights are ever held whole. The backward pass computes a block's weights again (as FlashAttention does, Dao
et al. 2022, arXiv 2205.14135); what is kept is what went in. Where a gradient is asked, short rows share a block: a
block for each would be many small products, which gain little from a second thread (`benchmarks/findings/speed.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

# Scores of a block: a megabyte in bf16, two in fp32. Half and double as many were no faster.
BLOCK = 2**19
# Queries of a block at least: fewer make matrix products that a core is slow at.
LEAST = 16
# Scores of rows that share a block, over those that each would have alone: the rest are of other rows' keys.
SHARED = 1.25


# First and last (excluded) of tokens that lie together.
Piece = tuple[int, int]


@dataclass(frozen=True)
class Own:
    """Where a row's queries lie among all, and its own keys and values (Hkv, T, D): the last ones are the queries'.

    `pieces`, which a gradient needs, say where the keys lie among all. Of several rows in one, `hidden` (queries, T)
    says which keys a query does not see; None: of the last ones those that come after it.
    """

    first: int
    last: int
    keys: torch.Tensor
    values: torch.Tensor
    pieces: tuple[Piece, ...] = ()
    hidden: torch.Tensor | None = None


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
    parts = [x.to(v.dtype).contiguous() for x in (q, k, v, *(prefix or (empty, empty)))]
    rows = _joined(tuple(pieces_of(counts, after)), len(q) // len(k), parts[3].shape[1], BLOCK)
    out: torch.Tensor = _Attention.apply(*parts, rows)
    return out


def pieces_of(counts: Sequence[int], after: Sequence[tuple[Piece, ...]] | None) -> list[tuple[Piece, ...]]:
    """Where the keys of each row lie: what it goes on from, and its own tokens as the last piece."""
    ends = list(accumulate(counts))
    own = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [(*seen, mine) for seen, mine in zip(after or [()] * len(own), own, strict=True)]


def attend_seen(q: torch.Tensor, rows: Sequence[Own], prefix: Prefix | None) -> torch.Tensor:
    """`attend_rows` without a gradient, of rows that also see what was there before their queries. Each row has blocks
    of its own: what it comes to does not depend on which others are there."""
    q = q.contiguous()
    out = torch.empty_like(q)
    for block in _blocks(q, rows, prefix):
        out[block.place] = torch.bmm(block.weights(), block.values).view(-1, block.count, q.shape[2])
    return out


@dataclass(frozen=True)
class _Block:
    """Queries `first` to `last` of the heads that share the key-value heads `groups`, and all that they see: keys and
    values (groups, before + T, D), a prefix of `before` tokens first, then the row's own up to the last query's."""

    row: Own
    first: int
    last: int
    groups: slice
    heads: slice
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def place(self) -> tuple[slice, slice]:
        """Where the queries lie among all, (H, N)."""
        return self.heads, slice(self.first, self.last)

    def weights(self) -> torch.Tensor:
        """(groups, queries of all heads of a group, before + T)."""
        scores = torch.bmm(self.queries, self.keys.transpose(1, 2))
        hidden = _later(self.count, scores.device) if self.row.hidden is None else self.row.hidden
        last = scores.view(-1, self.count, scores.shape[2])[:, :, -hidden.shape[1] :]
        last.masked_fill_(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1)


@lru_cache(maxsize=64)
def _later(count: int, device: torch.device) -> torch.Tensor:
    """Of `count` tokens in a row, those that come after each, (count, count): asked for once a layer and row."""
    with torch.inference_mode(False):
        return torch.ones(count, count, dtype=torch.bool, device=device).triu_(1)


class _Behind:
    """Keys, or values, of what a row sees: those of a prefix, put there once, and behind them the row's own."""

    def __init__(self, prefix: torch.Tensor | None, most: int) -> None:
        self.before = 0 if prefix is None else prefix.shape[1]
        if prefix is not None and self.before:
            self._held = prefix.new_empty(len(prefix), self.before + most, prefix.shape[2])
            self._held[:, : self.before] = prefix

    def __call__(self, own: torch.Tensor) -> torch.Tensor:
        """(Hkv, before + T, D), until the next call."""
        if not self.before:
            return own
        seen = self._held[:, : self.before + own.shape[1]]
        seen[:, self.before :] = own
        return seen


def _blocks(q: torch.Tensor, rows: Sequence[Own], prefix: Prefix | None) -> Iterator[_Block]:
    most = max(row.keys.shape[1] for row in rows)
    pk, pv = (_Behind(x, most) for x in prefix or (None, None))
    groups = len(rows[0].keys)
    each = len(q) // groups
    for row in rows:
        keys, values = pk(row.keys), pv(row.values)
        count = row.last - row.first
        parts = -(-count // max(LEAST, BLOCK // (each * keys.shape[1])))
        for part in range(parts):
            first, last = (row.first + count * end // parts for end in (part, part + 1))
            end = keys.shape[1] - (row.last - last)
            at_once = groups if len(q) * (last - first) * end <= BLOCK else 1
            for group in range(0, groups, at_once):
                some, heads = slice(group, group + at_once), slice(group * each, (group + at_once) * each)
                queries = q[heads, first:last].reshape(at_once, -1, q.shape[2])
                yield _Block(row, first, last, some, heads, queries, keys[some, :end], values[some, :end])


@dataclass(frozen=True)
class _Joined:
    """Rows that share their blocks, see `Own`."""

    first: int
    last: int
    pieces: tuple[Piece, ...]
    hidden: torch.Tensor | None


@lru_cache(maxsize=64)
def _joined(rows: tuple[tuple[Piece, ...], ...], each: int, before: int, block: int) -> list[_Joined]:
    """The rows in their order, neighbours together where their queries, of `each` heads, fit one block. All layers of
    a pass ask for the same."""
    found: list[_Joined] = []
    together: list[tuple[Piece, ...]] = []
    for row in rows:
        if together and not _fit([*together, row], each, before, block):
            found.append(_join(together))
            together = []
        together.append(row)
    return [*found, _join(together)] if together else found


def _fit(rows: Sequence[tuple[Piece, ...]], each: int, before: int, block: int) -> bool:
    queries = rows[-1][-1][1] - rows[0][-1][0]
    scores = queries * (before + _tokens({piece for row in rows for piece in row}))
    alone = sum((row[-1][1] - row[-1][0]) * (before + _tokens(row)) for row in rows)
    return each * scores <= block and scores <= SHARED * alone


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(last - first for first, last in pieces)


def _join(rows: Sequence[tuple[Piece, ...]]) -> _Joined:
    """What several rows see stands once."""
    first, last = rows[0][-1][0], rows[-1][-1][1]
    if len(rows) == 1:
        return _Joined(first, last, rows[0], None)
    pieces = sorted({piece for row in rows for piece in row})
    starts = dict(zip(pieces, accumulate((b - a for a, b in pieces), initial=0), strict=False))
    with torch.inference_mode(False):
        hidden = torch.ones(last - first, _tokens(pieces), dtype=torch.bool)
        for row in rows:
            own, count = row[-1], row[-1][1] - row[-1][0]
            mine = hidden[own[0] - first : own[1] - first]
            for piece in row[:-1]:
                mine[:, starts[piece] : starts[piece] + piece[1] - piece[0]] = False
            mine[:, starts[own] : starts[own] + count].triu_(1)
    return _Joined(first, last, _merged(pieces), hidden)


def _merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces in their order, as few as can be."""
    found = [pieces[0]]
    for first, last in pieces[1:]:
        if first == found[-1][1]:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def put_together(x: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """The pieces of x (H, N, D), one after the other, (H, T, D)."""
    parts = [x[:, first:last] for first, last in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rows(k: torch.Tensor, v: torch.Tensor, rows: Sequence[_Joined]) -> list[Own]:
    return [
        Own(row.first, row.last, put_together(k, row.pieces), put_together(v, row.pieces), row.pieces, row.hidden)
        for row in rows
    ]


def _add(prefix: torch.Tensor, own: torch.Tensor, block: _Block, sent: torch.Tensor) -> None:
    """Add what a block sends to keys, or values, (groups, before + T, D): to the prefix's (Hkv, P, D), and to its own
    where they lie in `own` (Hkv, N, D)."""
    at = prefix.shape[1]
    prefix[block.groups] += sent[:, :at]
    for first, last in block.row.pieces:
        last = min(last, block.last)
        own[block.groups, first:last] += sent[:, at : at + last - first]
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
        rows: Sequence[_Joined],
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, pk, pv)
        ctx.rows = rows
        return attend_seen(q, _rows(k, v, rows), (pk, pv))

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        q, k, v, pk, pv = ctx.saved_tensors
        dout = given[0].contiguous()
        dq = torch.empty_like(q)
        # Sums over many blocks: in bf16 what a block adds would be lost beside them.
        dk, dv, dpk, dpv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v, pk, pv))
        for block in _blocks(q, _rows(k, v, ctx.rows), (pk, pv)):
            sent = dout[block.place].reshape(block.queries.shape)
            weights = block.weights()
            _add(dpv, dv, block, torch.bmm(weights.transpose(1, 2), sent))
            slopes = torch.bmm(sent, block.values.transpose(1, 2))
            slopes = torch._softmax_backward_data(slopes, weights, -1, weights.dtype)
            _add(dpk, dk, block, torch.bmm(slopes.transpose(1, 2), block.queries))
            dq[block.place] = torch.bmm(slopes, block.keys).view(-1, block.count, q.shape[2])
        return dq, *(x.to(q.dtype) for x in (dk, dv, dpk, dpv)), None
