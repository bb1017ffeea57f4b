"""The forward pass of training: rows after a shared prefix that is computed once, logits where they are needed.

Shape suffixes: `models/training/grpo.py`. Here `_T` counts the tokens of a row after the prefix, padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.local.attention import attend_padded


class _Suffixes:
    """Forward pass with gradient of several rows after a shared prefix. Keys and values stay in the graph."""

    def __init__(self, counts: Sequence[int], prefix: Prefix | None, device: torch.device) -> None:
        counts_R = torch.tensor(counts)
        self.prefix, self.rows, self.width = prefix, len(counts), int(counts_R.max())
        row_N = torch.repeat_interleave(torch.arange(self.rows), counts_R)
        first_R = torch.cumsum(counts_R, 0) - counts_R
        within_N = torch.arange(int(counts_R.sum())) - torch.repeat_interleave(first_R, counts_R)
        self.place_N = (row_N * self.width + within_N).to(device)  # where a token lies in the padded rows
        later_TT = torch.ones(self.width, self.width, dtype=torch.bool, device=device).triu(1)
        self.hidden_RTT = later_TT.expand(self.rows, -1, -1)

    def _padded(self, x_HND: torch.Tensor) -> torch.Tensor:
        """(H, N, D) -> (R, H, T, D), zeros behind the end of a row."""
        heads, _, dim = x_HND.shape
        out = x_HND.new_zeros(self.rows * self.width, heads, dim).index_copy(0, self.place_N, x_HND.transpose(0, 1))
        return out.view(self.rows, self.width, heads, dim).transpose(1, 2)

    def attend(
        self, layer: int, q_HND: torch.Tensor, k_HND: torch.Tensor, v_HND: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        prefix = (self.prefix.k_HPD[layer], self.prefix.v_HPD[layer]) if self.prefix else None
        q_RHTD, k_RHTD, v_RHTD = (self._padded(x_HND) for x_HND in (q_HND, k_HND, v_HND))
        out_RHTD = attend_padded(q_RHTD * scaling, k_RHTD, v_RHTD, self.hidden_RTT, prefix)
        heads, _, dim = q_HND.shape
        return out_RHTD.transpose(1, 2).reshape(self.rows * self.width, heads, dim)[self.place_N]


class Prefix:
    """Forward pass with gradient of a shared prefix: keys and values, one (H, P, D) tensor per layer."""

    def __init__(self, causal: Any, ids: Sequence[int]) -> None:
        self.k_HPD: list[torch.Tensor] = []
        self.v_HPD: list[torch.Tensor] = []
        device = next(causal.parameters()).device
        ids_1P = torch.tensor([list(ids)], device=device)
        positions_1P = torch.arange(len(ids), device=device)[None]
        causal.model(input_ids=ids_1P, position_ids=positions_1P, use_cache=False, shared=self)

    def attend(
        self, layer: int, q_HPD: torch.Tensor, k_HPD: torch.Tensor, v_HPD: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        self.k_HPD.append(k_HPD)
        self.v_HPD.append(v_HPD)
        count = q_HPD.shape[1]
        hidden_1PP = torch.ones(1, count, count, dtype=torch.bool, device=q_HPD.device).triu(1)
        return attend_padded(q_HPD[None], k_HPD[None], v_HPD[None], hidden_1PP, None, scaling)[0].transpose(0, 1)


class StepPrefix(Prefix):
    """A prefix computed once for all micro-batches of an optimizer step, the weights being the same.

    Its keys and values are leaves: what micro-batches send back stays in them until `backward` sends the sum through
    the prefix, once. The gradient is that of computing the prefix in every micro-batch.
    """

    def __init__(self, causal: Any, ids: Sequence[int]) -> None:
        super().__init__(causal, ids)
        self._made = [*self.k_HPD, *self.v_HPD]
        self.k_HPD, self.v_HPD = (
            [x_HPD.detach().requires_grad_() if x_HPD.requires_grad else x_HPD for x_HPD in made]
            for made in (self.k_HPD, self.v_HPD)
        )

    def backward(self) -> None:
        """To be called after the last micro-batch's own backward pass, before the optimizer's step."""
        leaves = zip(self._made, [*self.k_HPD, *self.v_HPD], strict=True)
        sent = [(made, leaf.grad) for made, leaf in leaves if made.requires_grad and leaf.grad is not None]
        if sent:
            torch.autograd.backward([made for made, _ in sent], [gradient for _, gradient in sent])
        self._made.clear()


def common_prefix(ids_RT: Sequence[list[int]] | Sequence[tuple[int, ...]]) -> int:
    """How many leading ids all rows share."""
    first, last = min(ids_RT), max(ids_RT)  # what the two furthest apart share, all do
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def token_logprobs(
    causal: Any,
    ids_RT: Sequence[Sequence[int]],
    shared: int,
    wanted_RS: Sequence[Sequence[int]],
    temperature: float,
    prefix: Prefix | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probability and entropy (nats) of chosen tokens of each row.

    `causal` has `.model` and `.lm_head`; `ids_RT` are whole sequences whose first `shared` ids are equal; `wanted_RS`
    are positions (> shared) of the tokens to score; `prefix` is the pass over those `shared` ids, if it was made.
    Returns per row two tensors as long as its `wanted_RS`.
    """
    device = next(causal.parameters()).device
    if shared and prefix is None:
        prefix = Prefix(causal, ids_RT[0][:shared])
    # The last token of a row predicts nothing that is wanted.
    suffixes_RT = [list(ids_T[shared:-1]) for ids_T in ids_RT]
    batch = _Suffixes([len(ids_T) for ids_T in suffixes_RT], prefix, device)
    ids_1N = torch.tensor([[i for ids_T in suffixes_RT for i in ids_T]], device=device)
    positions_1N = torch.tensor([[shared + j for ids_T in suffixes_RT for j in range(len(ids_T))]], device=device)
    out = causal.model(input_ids=ids_1N, position_ids=positions_1N, use_cache=False, shared=batch)
    hidden_ND = out.last_hidden_state[0]
    starts = torch.tensor([0, *[len(ids_T) for ids_T in suffixes_RT]]).cumsum(0).tolist()
    where_S = [start + p - shared - 1 for start, wanted_S in zip(starts, wanted_RS, strict=False) for p in wanted_S]
    targets_S = torch.tensor([ids_RT[i][p] for i, wanted_S in enumerate(wanted_RS) for p in wanted_S], device=device)
    # The logits are the largest tensor of the pass: only what autograd needs is made of their size.
    logits_SV = causal.lm_head(hidden_ND[torch.tensor(where_S, device=device)]).float() / temperature
    logprobs_S = logits_SV.gather(1, targets_S[:, None])[:, 0] - torch.logsumexp(logits_SV, dim=-1)
    entropies_S = torch.cat([_entropy(part_SV) for part_SV in logits_SV.detach().split(128)])
    lengths = [len(wanted_S) for wanted_S in wanted_RS]
    return list(zip(logprobs_S.split(lengths), entropies_S.split(lengths), strict=True))


def _entropy(logits_SV: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each token's distribution, (S,)."""
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
    return -(logprobs_SV.exp() * logprobs_SV).sum(-1)
