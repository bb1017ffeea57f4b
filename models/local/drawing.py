"""Drawing tokens from logits by the inverse of the cumulative distribution, in few passes over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Words of the vocabulary that are summed before the search: the search then looks into one such block only.
BLOCK = 256


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], uniform: Sequence[float | None]
) -> tuple[list[int], list[float]]:
    """The token of each row of `logits` (R, vocabulary) and its log-probability (nats) at the row's temperature.

    `uniform` has one number in [0, 1) per row: the token at which the cumulative distribution passes it. None takes
    the likeliest one, and its log-probability is that of temperature 1.
    """
    scale = torch.tensor([1 / t if t > 0 else 1.0 for t in temperatures], device=logits.device)
    scaled = logits.float() if all(t == 1 or t <= 0 for t in temperatures) else logits * scale[:, None]
    most, likeliest = scaled.max(dim=-1)
    weights = torch.exp(scaled - most[:, None])
    rows, words = weights.shape
    blocks = -(-words // BLOCK)
    if blocks * BLOCK != words:
        weights = torch.nn.functional.pad(weights, (0, blocks * BLOCK - words))
    weights = weights.view(rows, blocks, BLOCK)
    upto = weights.sum(dim=-1).cumsum_(dim=-1)
    total = upto[:, -1]
    given = torch.tensor([0.0 if u is None else u for u in uniform], device=logits.device)
    wanted = given * total
    block = torch.searchsorted(upto, wanted[:, None], right=True)[:, 0].clamp_(max=blocks - 1)
    every = torch.arange(rows, device=logits.device)
    before = torch.where(block > 0, upto[every, (block - 1).clamp_(min=0)], 0.0)
    inside = weights[every, block].cumsum(dim=-1)
    # A sum over the block and its cumulative sum round differently: the search ends at the block's last likely word.
    at = torch.searchsorted(inside, (wanted - before).clamp_(min=0)[:, None], right=True)[:, 0]
    last = (inside < inside[:, -1:]).sum(dim=-1)
    picked = block * BLOCK + torch.minimum(at, last)
    greedy = torch.tensor([u is None for u in uniform], device=logits.device)
    chosen = torch.where(greedy, likeliest, picked)
    logprobs = scaled[every, chosen] - most - total.log()
    return chosen.tolist(), logprobs.tolist()
