"""The forward pass of training: rows after a shared prefix that is computed once, logits where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.local.attention import attend_padded


class _Suffixes:
    """Forward pass with gradient of several rows after a shared prefix. Keys and values stay in the graph."""

    def __init__(self, counts: Sequence[int], prefix: Prefix | None, device: torch.device) -> None:
        count = torch.tensor(counts)
        self.prefix, self.rows, self.width = prefix, len(counts), int(count.max())
        row = torch.repeat_interleave(torch.arange(self.rows), count)
        within = torch.arange(int(count.sum())) - torch.repeat_interleave(torch.cumsum(count, 0) - count, count)
        self.flat = (row * self.width + within).to(device)
        self.hidden = (
            torch.ones(self.width, self.width, dtype=torch.bool, device=device).triu(1).expand(self.rows, -1, -1)
        )

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, N, dim) -> (rows, heads, width, dim), zeros behind the end of a row."""
        heads, _, dim = x.shape
        out = x.new_zeros(self.rows * self.width, heads, dim).index_copy(0, self.flat, x.transpose(0, 1))
        return out.view(self.rows, self.width, heads, dim).transpose(1, 2)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        prefix = (self.prefix.k[layer], self.prefix.v[layer]) if self.prefix else None
        out = attend_padded(self._padded(q), self._padded(k), self._padded(v), self.hidden, prefix, scaling)
        return out.transpose(1, 2).reshape(self.rows * self.width, q.shape[0], q.shape[2])[self.flat]


class Prefix:
    """Forward pass with gradient of a shared prefix: `k` and `v`, one (heads, n, dim) tensor per layer."""

    def __init__(self, causal: Any, ids: Sequence[int]) -> None:
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        device = next(causal.parameters()).device
        positions = torch.arange(len(ids), device=device)[None]
        causal.model(
            input_ids=torch.tensor([list(ids)], device=device), position_ids=positions, use_cache=False, shared=self
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        self.k.append(k)
        self.v.append(v)
        n = q.shape[1]
        hidden = torch.ones(1, n, n, dtype=torch.bool, device=q.device).triu(1)
        return attend_padded(q[None], k[None], v[None], hidden, None, scaling)[0].transpose(0, 1)


class StepPrefix(Prefix):
    """A prefix computed once for all micro-batches of an optimizer step, the weights being the same.

    Its `k` and `v` are leaves: what micro-batches send back stays in them until `backward` sends the sum through the
    prefix, once. The gradient is that of computing the prefix in every micro-batch.
    """

    def __init__(self, causal: Any, ids: Sequence[int]) -> None:
        super().__init__(causal, ids)
        self._made = [*self.k, *self.v]
        self.k, self.v = (
            [t.detach().requires_grad_() if t.requires_grad else t for t in made] for made in (self.k, self.v)
        )

    def backward(self) -> None:
        """To be called after the last micro-batch's own backward pass, before the optimizer's step."""
        leaves = zip(self._made, [*self.k, *self.v], strict=True)
        sent = [(made, leaf.grad) for made, leaf in leaves if made.requires_grad and leaf.grad is not None]
        if sent:
            torch.autograd.backward([made for made, _ in sent], [gradient for _, gradient in sent])
        self._made.clear()


def common_prefix(rows: Sequence[list[int]] | Sequence[tuple[int, ...]]) -> int:
    """How many leading ids all rows share."""
    first, last = min(rows), max(rows)  # what the two furthest apart share, all do
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def token_logprobs(
    causal: Any,
    rows: Sequence[Sequence[int]],
    shared: int,
    wanted: Sequence[Sequence[int]],
    temperature: float,
    prefix: Prefix | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probability and entropy (nats) of chosen tokens of each row.

    `causal` has `.model` and `.lm_head`; `rows` are whole sequences whose first `shared` ids are equal; `wanted` are
    positions (> shared) of the tokens to score; `prefix` is the pass over those `shared` ids, if it was made. Returns
    per row two tensors as long as its `wanted`.
    """
    device = next(causal.parameters()).device
    if shared and prefix is None:
        prefix = Prefix(causal, rows[0][:shared])
    # The last token of a row predicts nothing that is wanted.
    suffixes = [list(row[shared:-1]) for row in rows]
    batch = _Suffixes([len(s) for s in suffixes], prefix, device)
    flat = torch.tensor([[i for s in suffixes for i in s]], device=device)
    positions = torch.tensor([[shared + j for s in suffixes for j in range(len(s))]], device=device)
    hidden = causal.model(input_ids=flat, position_ids=positions, use_cache=False, shared=batch).last_hidden_state[0]
    starts = torch.tensor([0, *[len(s) for s in suffixes]]).cumsum(0).tolist()
    where = [start + p - shared - 1 for start, row in zip(starts, wanted, strict=False) for p in row]
    targets = torch.tensor([rows[i][p] for i, row in enumerate(wanted) for p in row], device=device)
    logits = causal.lm_head(hidden[torch.tensor(where, device=device)]).float() / temperature
    # logits are (tokens, vocabulary), the largest tensor of the pass: only what autograd needs is made of their size.
    chosen = logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
    entropy = torch.cat([_entropy(part) for part in logits.detach().split(128)])
    lengths = [len(row) for row in wanted]
    return list(zip(chosen.split(lengths), entropy.split(lengths), strict=True))


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)
