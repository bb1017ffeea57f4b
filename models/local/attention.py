"""Attention over a prefix that all rows share and a suffix of each row's own, for sampling and for training.

Registered with transformers under `NAME`, so that any model that uses its attention interface can run it. The
batch travels as the keyword argument `shared`: one object per forward pass, which stores keys and values and
knows which query may see which key. The prefix is held once, not once per row: scores against it are one matrix
product for the whole batch. Softmax runs over prefix and suffix together, so the result is exact. What some
architectures add to that (a window, a cap of the scores, a sink) travels as `Extras` of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from errors import PolicyError
from models.local.packed import arrange, can_arrange
from models.local.shapes import why_not_played

NAME = "trace_shared_prefix"
# Queries at once where no kernel knows the causal mask by itself: then the mask is held.
QUERIES = 1024


@dataclass(frozen=True)
class Extras:
    """What a layer's attention has beyond the plain one. `window`: a query sees itself and the `window` - 1 tokens
    before it; `cap` bounds scores as cap tanh(score / cap); `sinks` (H,) are scores of one more key without a value."""

    window: int | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None


class SharedBatch(Protocol):
    """What a forward pass asks of its batch: q (N, H, D), already scaled, k and v (N, Hkv, D) of N flat tokens ->
    (N, H, D). `extras` None is plain attention."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras | None = None
    ) -> torch.Tensor: ...


class RowBatch(SharedBatch, Protocol):
    """A batch of rows of `counts` tokens, one after the other; `part` is some of them by themselves."""

    @property
    def counts(self) -> Sequence[int]: ...

    def part(self, rows: Sequence[int]) -> RowBatch: ...


def _interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    shared: SharedBatch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, H, N, D), key and value (1, Hkv, N, D) for N flat tokens -> (1, N, H, D)."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    plain = sliding_window is None and softcap is None and s_aux is None
    extras = None if plain else Extras(sliding_window, softcap, s_aux)
    return shared.attend(module.layer_idx, q * scaling, k, v, extras).unsqueeze(0), None


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

    In fp32 with AVX-512 they are arranged as the model's own weights are: the plain product of 48 rows takes 1.6 times
    as long (benchmarks/findings/speed.md). With AVX2 alone the arranged one takes longer, with few rows three to six
    times as long; and in bf16 the plain one is the faster. `arranged` decides instead."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, arranged: bool | None = None) -> None:
        self.k, self.v = k, v
        wide = torch.backends.cpu.get_cpu_capability() != "AVX2"
        self.arranged = wide and k.dtype == torch.float32 and can_arrange(k) if arranged is None else arranged
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


def attend_with_extras(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
    places: torch.Tensor,
    extras: Extras,
) -> torch.Tensor:
    """`attend_padded` for a layer with `extras`. `places` (R, L) say where each query's own key lies among `keys`."""
    rows, heads, length, dim = q.shape
    groups, total = keys.shape[1:3]
    q = q.reshape(rows, groups, -1, dim)
    own = torch.matmul(q, keys.transpose(2, 3)).view(rows, heads, length, total)
    parts, kept = [_capped(own, extras.cap) + hidden[:, None]], []
    far = places[:, None, :, None]
    if extras.window is not None:
        parts[0] = parts[0].masked_fill(far - torch.arange(total, device=q.device) >= extras.window, float("-inf"))
    if prefix is not None:
        # No query sees further back than its window, and all stand behind the prefix.
        first = 0 if extras.window is None else max(0, prefix[0].shape[1] - extras.window + 1)
        kept = [t[:, first:] for t in prefix]
        size = kept[0].shape[1]
        flat = q.transpose(0, 1).reshape(groups, -1, dim)
        common = torch.matmul(flat, kept[0].transpose(1, 2)).view(groups, rows, -1, size).transpose(0, 1)
        common = _capped(common.reshape(rows, heads, length, size), extras.cap)
        if extras.window is not None:
            back = far + torch.arange(size, 0, -1, device=q.device)
            common = common.masked_fill(back >= extras.window, float("-inf"))
        parts.insert(0, common)
    if extras.sinks is not None:
        parts.append(extras.sinks.to(q.dtype)[None, :, None, None].expand(rows, -1, length, 1))
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    sizes = [part.shape[-1] for part in parts]
    split = weights.split(sizes, dim=-1)
    rest = split[1] if kept else split[0]
    out = torch.matmul(rest.reshape(rows, groups, -1, total), values)
    if kept:
        seen = split[0].reshape(rows, groups, -1, sizes[0]).transpose(0, 1).reshape(groups, -1, sizes[0])
        out = out + torch.matmul(seen, kept[1]).view(groups, rows, -1, dim).transpose(0, 1)
    return out.reshape(rows, heads, length, dim)


def _capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    return scores if cap is None else torch.tanh(scores / cap) * cap


def check_supported(config: Any) -> None:
    """Whether the sampler can run a model of this configuration: loaded with `NAME`, and of a shape that is covered.

    Raises `PolicyError`.
    """
    if config._attn_implementation != NAME:
        raise PolicyError(
            f"the model was loaded with attention {config._attn_implementation!r}; "
            f"load it with {NAME!r} to sample from it"
        )
    if reason := why_not_played(config):
        raise PolicyError(f"a model of type {config.model_type} cannot be played in this process: {reason}")
