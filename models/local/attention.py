"""Attention over a prefix that all rows share and a suffix of each row's own, for sampling and for training.

Registered with transformers under `NAME`, so that any model that uses its attention interface can run it. The
batch travels as the keyword argument `shared`: one object per forward pass, which stores keys and values and
knows which query may see which key. The prefix is held once, not once per row: scores against it are one matrix
product for the whole batch. Softmax runs over prefix and suffix together, so the result is exact.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from errors import PolicyError
from models.local.packed import arrange, can_arrange

NAME = "trace_shared_prefix"
# Numbers of attention weights of one layer that a training pass may hold at once on a CPU: 1 GiB in fp32.
MOST_WEIGHTS = 2**28
# Queries at once where no kernel knows the causal mask by itself: then the mask is held.
QUERIES = 1024


class SharedBatch(Protocol):
    """What a forward pass asks of its batch: q (N, H, D), already scaled, k and v (N, Hkv, D) of N flat tokens ->
    (N, H, D)."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


def _interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    shared: SharedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, H, N, D), key and value (1, Hkv, N, D) for N flat tokens -> (1, N, H, D)."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return shared.attend(module.layer_idx, q * scaling, k, v).unsqueeze(0), None


AttentionInterface.register(NAME, _interface)


def attend_padded(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Grouped-query attention of padded rows.

    q (R, H, L, D), already scaled; keys, values (R, Hkv, T, D); hidden (R, L, T), -inf where a key is out of sight
    and 0 elsewhere; prefix keys and values (Hkv, P, D), seen by all. Returns (R, H, L, D).
    """
    rows, heads, length, dim = q.shape
    groups = keys.shape[1]
    q = q.reshape(rows, groups, -1, dim)  # (R, Hkv, G*L, D): query heads of a group share their keys
    own = torch.matmul(q, keys.transpose(2, 3))
    if length == 1:
        own = own.add_(hidden[:, None])
    else:
        parts = own.view(rows, groups, -1, length, keys.shape[2])
        own = parts.add_(hidden[:, None, None]).view(rows, groups, q.shape[2], keys.shape[2])
    if prefix is None:
        return torch.matmul(torch.softmax(own, dim=-1), values).reshape(rows, heads, length, dim)
    pk, pv = prefix
    flat = q.transpose(0, 1).reshape(groups, -1, dim)  # (Hkv, R*G*L, D): one product against the shared prefix
    common = torch.matmul(flat, pk.transpose(1, 2)).view(groups, rows, q.shape[2], -1).transpose(0, 1)
    weights = torch.softmax(torch.cat([common, own], dim=-1), dim=-1)
    seen, rest = weights.split([pk.shape[1], keys.shape[2]], dim=-1)
    out = torch.matmul(rest, values)
    shared = torch.matmul(seen.transpose(0, 1).reshape(groups, -1, pk.shape[1]), pv)
    return (out + shared.view(groups, rows, -1, dim).transpose(0, 1)).reshape(rows, heads, length, dim)


def holds_weights(rows: int, heads: int, length: int, keys: int, device: torch.device) -> bool:
    """Whether a training pass holds all attention weights of a layer (`attend_padded`). On a CPU that is the faster way
    while they are small; a GPU has kernels that never hold them, and a long conversation's fit nowhere."""
    return device.type == "cpu" and rows * heads * length * keys <= MOST_WEIGHTS


def attend_causal(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefix: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Grouped-query attention of one row without holding its weights, by the fastest of torch's kernels
    (FlashAttention on a GPU in half precision).

    q (H, L, D), already scaled; keys, values (Hkv, L, D); prefix keys and values (Hkv, P, D), seen by all. Returns
    (H, L, D).
    """
    if prefix is not None:
        keys, values = (torch.cat([seen, own], dim=1) for seen, own in zip(prefix, (keys, values), strict=True))
    q, keys = q.to(values.dtype), keys.to(values.dtype)  # autocast does not reach all of these kernels
    heads, length, _ = q.shape
    before, each = keys.shape[1] - length, heads // len(keys)
    keys, values = (x.repeat_interleave(each, dim=0)[None] for x in (keys, values))
    if not before:
        out: torch.Tensor = F.scaled_dot_product_attention(q[None], keys, values, is_causal=True, scale=1.0)[0]
        return out
    step = length if q.is_cuda else QUERIES
    parts = []
    for first in range(0, length, step):
        last = min(first + step, length)
        mask: Any = causal_lower_right(last - first, before + last)
        seen = keys[:, :, : before + last], values[:, :, : before + last]
        parts.append(F.scaled_dot_product_attention(q[None, :, first:last], *seen, attn_mask=mask, scale=1.0)[0])
    return torch.cat(parts, dim=1)


class PrefixWeights:
    """Keys and values of a shared prefix in one layer, (Hkv, P, D) each, as the matrices that decoding multiplies by.

    In fp32 they are arranged as the model's own weights are: the plain product takes 1.6 times as long
    (`benchmarks/README.md`); in bf16 the plain one is the faster."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v
        self.arranged = k.dtype == torch.float32 and can_arrange(k)
        if self.arranged:
            self._k = [arrange(head) for head in k]
            self._v = [arrange(head.t()) for head in v]

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """q (Hkv, N, D) -> (Hkv, N, P)."""
        return self._times(q, self._k) if self.arranged else torch.bmm(q, self.k.transpose(1, 2))

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        """weights (Hkv, N, P) -> (Hkv, N, D)."""
        return self._times(weights, self._v) if self.arranged else torch.bmm(weights, self.v)

    @staticmethod
    def _times(x: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise
        return torch.stack([multiply(part, m, None, "none", [], "") for part, m in zip(x, matrices, strict=True)])


def attend_decoding(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, prefix: PrefixWeights | None
) -> torch.Tensor:
    """Grouped-query attention of rows with one new token each.

    q (R, H, D), already scaled; keys, values (R, Hkv, T, D); hidden (R * Hkv, 1, T), -inf where a key is out of sight
    and 0 elsewhere; the prefix is seen by all. Returns (R, H, D).
    """
    rows, heads, dim = q.shape
    groups, length = keys.shape[1:3]
    each = q.reshape(rows * groups, -1, dim)
    keys, values = keys.reshape(rows * groups, length, dim), values.reshape(rows * groups, length, dim)
    if q.dtype == torch.bfloat16:  # three queries to a key-value head: as the right side they take 0.4 of the time
        own = torch.bmm(keys, each.transpose(1, 2)).transpose(1, 2)
    else:
        own = torch.bmm(each, keys.transpose(1, 2))
    own = own.add_(hidden)
    if prefix is None:
        return torch.bmm(torch.softmax(own, dim=-1), values).view(rows, heads, dim)
    size = prefix.k.shape[1]
    by_group = own.view(rows, groups, -1, length).transpose(0, 1).reshape(groups, -1, length)
    flat = each.view(rows, groups, -1, dim).transpose(0, 1).reshape(groups, -1, dim)  # (Hkv, R*G, D)
    weights = torch.softmax(torch.cat([prefix.scores(flat), by_group], dim=-1), dim=-1)
    out, rest = prefix.mixed(weights[..., :size]), weights[..., size:]
    split = rest.view(groups, rows, -1, length).transpose(0, 1).reshape(rows * groups, -1, length)
    mixed = torch.bmm(split, values).view(rows, groups, -1, dim)
    return mixed.add_(out.view(groups, rows, -1, dim).transpose(0, 1)).view(rows, heads, dim)


def check_supported(config: Any) -> None:
    """Whether the sampler can run a model of this configuration: loaded with `NAME`, full attention in every layer.

    Raises `PolicyError`.
    """
    if config._attn_implementation != NAME:
        raise PolicyError(
            f"the model was loaded with attention {config._attn_implementation!r}; "
            f"load it with {NAME!r} to sample from it"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise PolicyError(
            f"layers of kind {sorted(kinds - {'full_attention'})} are not supported; use the vllm backend"
        )
