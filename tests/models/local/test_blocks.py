"""Attention by blocks: against the whole score matrix in double precision, forward and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from models.local import blocks
from models.local.blocks import Own, attend_rows, attend_seen
from models.training.forward import attend_by_kernels

HEADS, GROUPS, DIM = 6, 2, 8
COUNTS = (1, 40, 7)


def numbers(*shape: int, kind: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=kind)


def whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: tuple[int, ...], pk: torch.Tensor, pv: torch.Tensor
) -> torch.Tensor:
    """The definition: one matrix of scores a row and head."""
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    rows = []
    for first, last in pairwise(ends):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            keys, values = torch.cat([pk[group], k[group, first:last]]), torch.cat([pv[group], v[group, first:last]])
            later = torch.ones(last - first, len(keys)).triu(1 + pk.shape[1]).bool()
            scores = (q[head, first:last] @ keys.t()).masked_fill(later, float("-inf"))
            heads.append(scores.softmax(-1) @ values)
        rows.append(torch.stack(heads))
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("block", [1, 2**9, blocks.BLOCK])
@pytest.mark.parametrize("before", [0, 11, 200])
def test_blocks_give_what_whole_scores_give_and_its_gradient(
    monkeypatch: pytest.MonkeyPatch, block: int, before: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    torch.manual_seed(0)
    tokens = sum(COUNTS)
    given = [numbers(HEADS, tokens, DIM), *(numbers(GROUPS, n, DIM) for n in (tokens, tokens, before, before))]
    sent = numbers(HEADS, tokens, DIM)
    found = []
    for attend in (
        lambda q, k, v, pk, pv: whole(q, k, v, COUNTS, pk, pv),
        lambda q, k, v, pk, pv: attend_rows(q, k, v, COUNTS, (pk, pv) if before else None),
    ):
        leaves = [x.clone().requires_grad_() for x in given]
        out = attend(*leaves)
        out.backward(sent)
        found.append([out.detach(), *(x.grad for x in leaves[: 5 if before else 3])])
    for expected, blocked in zip(*found, strict=True):
        assert float(expected.abs().max()) > 1e-3
        # Sums over blocks are in fp32, whatever the numbers are.
        assert torch.allclose(blocked, expected, atol=1e-5)


@pytest.mark.parametrize("before", [5, 200])
@pytest.mark.parametrize("attend", [attend_rows, attend_by_kernels])
def test_rows_go_on_from_pieces_of_others_and_send_them_their_gradient(
    attend: Callable[..., torch.Tensor], before: int
) -> None:
    """Against the same rows written out: each with all that it goes on from before it."""
    torch.manual_seed(0)
    counts, after = (9, 4, 30, 1), ((), ((0, 9),), ((0, 9), (9, 13)), ((0, 9), (9, 13)))
    starts = (0, 9, 13, 43)
    given = [numbers(HEADS, 44, DIM), *(numbers(GROUPS, n, DIM) for n in (44, 44, before, before))]
    sent = numbers(HEADS, 44, DIM)

    def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *prefix: torch.Tensor) -> torch.Tensor:
        rows = []
        for first, count, pieces in zip(starts, counts, after, strict=True):
            places = [i for piece in (*pieces, (first, first + count)) for i in range(*piece)]
            row = whole(q[:, places], k[:, places], v[:, places], (len(places),), *prefix)
            rows.append(row[:, -count:])
        return torch.cat(rows, dim=1)

    found = []
    for way in (written_out, lambda q, k, v, *prefix: attend(q, k, v, counts, prefix, after)):
        leaves = [x.clone().requires_grad_() for x in given]
        out = way(*leaves)
        out.backward(sent)
        found.append([out.detach(), *(x.grad for x in leaves)])
    for expected, got in zip(*found, strict=True):
        assert float(expected.abs().max()) > 1e-3
        assert torch.allclose(got, expected, atol=1e-5)


def test_short_rows_share_a_block_while_little_of_it_is_in_vain() -> None:
    """Behind a long prefix what a row has of its own matters little; a row that begins where another does sees it."""
    rows = (((0, 9),), ((0, 9), (9, 13)), ((0, 9), (13, 20)), ((20, 60),))
    block = 3 * 20 * 420
    together, last = blocks._joined(rows, 3, 400, block)
    assert (together.first, together.last, together.pieces, last.hidden) == (0, 20, ((0, 20),), None)
    assert together.hidden is not None
    seen = [[i for i, hidden in enumerate(line) if not hidden] for line in together.hidden.tolist()]
    assert seen[8] == list(range(9))
    assert seen[9] == list(range(10))
    assert seen[13] == [*range(9), 13]
    assert [row.last for row in blocks._joined(rows, 3, 400, block - 1)] == [13, 20, 60], "no more than a block"
    assert len(blocks._joined(rows, 3, 0, block)) == 4, "without a prefix most of it would be in vain"


def test_queries_see_what_their_row_had_before_them() -> None:
    torch.manual_seed(0)
    q, k, v = numbers(HEADS, 30, DIM), numbers(GROUPS, 30, DIM), numbers(GROUPS, 30, DIM)
    prefix = numbers(GROUPS, 5, DIM), numbers(GROUPS, 5, DIM)
    expected = whole(q, k, v, (30,), *prefix)[:, 9:]
    assert torch.allclose(attend_seen(q[:, 9:], [Own(0, 21, k, v)], prefix), expected)


def test_in_half_precision_many_rows_keep_what_each_adds_to_the_prefix() -> None:
    """400 rows send a thousandth of the sum each: added up in bf16 most of it would be lost."""
    torch.manual_seed(0)
    q, k, v = (torch.full((n, 400, DIM), 0.1, dtype=torch.bfloat16) for n in (HEADS, GROUPS, GROUPS))
    prefix = [torch.full((GROUPS, 1, DIM), 0.1, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    attend_rows(q, k, v, [1] * 400, (prefix[0], prefix[1])).backward(torch.ones_like(q))
    # Each of three heads sends half of its gradient to the prefix's value, half to the row's own.
    assert prefix[1].grad is not None
    assert prefix[1].grad.float().mean() == pytest.approx(400 * 3 / 2, rel=0.01)
