"""Drawing tokens from logits by the inverse of the cumulative distribution, in few passes over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

# Words of the vocabulary that are summed before the search: the search then looks into one such block only.
BLOCK = 256
# Rows at once on a processor: their logits stay in its cache from the first pass over them to the last. A GPU takes all
# together: each of the two dozen operations is a launch.
ROWS = 8
# Exponent up to which a word has no weight: beside the 1 of the likeliest, fp32 has none for it. Powers near the least
# that fp32 holds would take a processor twenty times as long as others.
LEAST = -80.0
# The least temperature above 0 that logits are divided by: divided by much less, fp32 does not hold them, and at this
# one the likeliest word is drawn. vLLM divides by 0.01 at least.
COLDEST = 1e-5


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], uniform: Sequence[float | None]
) -> tuple[list[int], list[float]]:
    """The token of each row of `logits` (R, vocabulary) and its log-probability (nats) at the row's temperature.

    `uniform` has one number in [0, 1) per row: the token at which the cumulative distribution passes it. None takes
    the likeliest one, and its log-probability is that of temperature 1.
    """
    inverse = [1 / max(t, COLDEST) if t > 0 else 1.0 for t in temperatures]
    given = [0.0 if u is None else u for u in uniform]
    numbers = torch.tensor([inverse, given], device=logits.device).T
    greedy = torch.tensor([u is None for u in uniform], device=logits.device)
    rows = ROWS if logits.device.type == "cpu" else max(1, len(logits))
    found = [_draw(*part) for part in zip(logits.split(rows), numbers.split(rows), greedy.split(rows), strict=True)]
    chosen, logprobs = (torch.cat(parts) for parts in zip(*found, strict=True))
    return chosen.tolist(), logprobs.tolist()


def _draw(logits: torch.Tensor, numbers: torch.Tensor, greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of a few rows; `numbers` are 1 / temperature and the uniform number of each."""
    scaled = logits.to(torch.float32, copy=True).mul_(numbers[:, :1])
    most, likeliest = scaled.max(dim=-1)
    rows, words = scaled.shape
    blocks = -(-words // BLOCK)
    if blocks * BLOCK != words:
        scaled = F.pad(scaled, (0, blocks * BLOCK - words), value=float("-inf"))
    every = torch.arange(rows, device=logits.device)
    powers = scaled.sub_(most[:, None]).clamp_(min=LEAST).exp_()
    weights = F.threshold(powers, 2 * math.exp(LEAST), 0.0, inplace=True).view(rows, blocks, BLOCK)
    upto = weights.sum(dim=-1).cumsum_(dim=-1)
    total = upto[:, -1]
    wanted = numbers[:, 1] * total
    # A number that rounds to 1 passes the end: the search ends at the last block, and in it the last word, with weight.
    block = torch.searchsorted(upto, wanted[:, None], right=True)[:, 0]
    block = torch.minimum(block, (upto < total[:, None]).sum(dim=-1))
    before = torch.where(block > 0, upto[every, (block - 1).clamp(min=0)], 0.0)
    inside = weights[every, block].cumsum(dim=-1)
    at = torch.searchsorted(inside, (wanted - before).clamp_(min=0)[:, None], right=True)[:, 0]
    last = (inside < inside[:, -1:]).sum(dim=-1)
    picked = block * BLOCK + torch.minimum(at, last)
    chosen = torch.where(greedy, likeliest, picked)
    return chosen, (weights.view(rows, -1)[every, chosen] / total).log()
