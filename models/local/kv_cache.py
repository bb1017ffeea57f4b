"""Keys and values of sampling: one store for all rows, and the passes that fill it and attend to it."""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from models.local.attention import Extras, PrefixWeights, attend_decoding, attend_padded, attend_with_extras
from models.local.blocks import Own, attend_seen
from models.local.shapes import context_of
from models.policy import Generation, Request

# New tokens of the longest row from which a CPU attends row by row, in blocks; fewer make too many small products.
ROW_BY_ROW = 32
# Bytes of scores at once, of rows that are attended to together: about what stays in a core's caches, and, on a GPU,
# what keeps it busy without filling its memory (there are a few tensors of that size at a time).
SCORES_AT_ONCE, SCORES_ELSEWHERE = 2**22, 2**29
# Queries of a shared prefix that are attended to at once: bounds the memory of their scores.
QUERIES_AT_ONCE = 512
OUT_OF_SIGHT = float("-inf")
# Tokens that another row has, too, from which a row takes their keys and values over.
LEAST_ALIKE = 8


def room_for(length: int, most: int) -> int:
    """Tokens that a row gets room for if `length` are asked for: more, so that it seldom grows, but at most `most`."""
    return min(max(64, -(-length * 3 // 2 // 32) * 32), max(length, most))


class KeyValueCache:
    """Keys and values of all rows: a tensor (2, slots, Hkv, T, D) for each layer, which grows in T.

    On a CPU all `slots` are there from the beginning: memory that was never written costs nothing. Elsewhere all of it
    is taken at once, so there are only as many slots as have been in use together (`held`).
    """

    def __init__(self, config: object, slots: int, like: torch.Tensor, most: int | None = None) -> None:
        """`most` tokens are asked for at most in a row: the model's context, unless it is given."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads  # type: ignore[attr-defined]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads  # type: ignore[attr-defined]
        self.layers, self.slots, self.heads, self.dim = config.num_hidden_layers, slots, heads, dim  # type: ignore[attr-defined]
        self.most = context_of(config) if most is None else most
        self.like = like
        self.room = self.held = 0
        self.store: list[torch.Tensor] = []

    def reserve(self, length: int, used: Sequence[int] = ()) -> None:
        """Make room for `length` tokens per row. `used` are the tokens that the slots in use hold, which are the first;
        without it nothing is held, and all slots are asked for.

        Only what is used is copied, so that a few long episodes do not pay for all slots, and layer by layer, so that
        one layer at a time is there twice. Where memory runs out nothing is held any more.
        """
        whole = self.like.device.type == "cpu" or not used
        slots = max(self.held, self.slots if whole else len(used))
        if length <= self.room and slots == self.held:
            return
        room = self.room if length <= self.room else room_for(length, self.most)
        shape = (2, slots, self.heads, room, self.dim)
        kept = [(slot, held) for slot, held in enumerate(used) if held]
        before = deque(self.store if kept else ())
        self.clear()  # what is not kept is free before more is asked for
        grown = list[torch.Tensor]()
        for _ in range(self.layers):
            grown.append(self._grown(before.popleft(), kept, shape) if kept else _zeros(self.like, shape))
        self.store, self.room, self.held = grown, room, slots
        self._give_back()

    def _grown(self, before: torch.Tensor, kept: list[tuple[int, int]], shape: tuple[int, ...]) -> torch.Tensor:
        """A layer's keys and values in a larger tensor; the caller has no other hold on the one before."""
        grown = _zeros(self.like, shape)
        for slot, held in kept:
            grown[:, slot, :, :held] = before[:, slot, :, :held]
        return grown

    def copy(self, places: Sequence[tuple[int, int]], length: int) -> None:
        """Put the first `length` tokens of slots into others; pairs of such a slot and the one that takes them."""
        sources, slots = (torch.tensor(x, device=self.like.device) for x in zip(*places, strict=True))
        for layer in self.store:
            layer[:, :, :, :length].index_copy_(1, slots, layer[:, :, :, :length].index_select(1, sources))

    def wipe(self, slots: Iterable[int]) -> None:
        """Zero what these slots hold, which may be NaN. Whoever has them next hides what is left there by adding -inf
        to its scores and by a weight of 0, and a NaN comes through both."""
        for layer in self.store:
            for slot in slots:
                layer[:, slot].zero_()

    def clear(self) -> None:
        """Drop the buffer, and give its memory back."""
        self.store, self.room, self.held = [], 0, 0
        self._give_back()

    def _give_back(self) -> None:
        """What torch keeps of a smaller buffer would fit nothing larger, and no other process could take it."""
        if self.like.device.type != "cpu" and torch.cuda.is_available():
            torch.cuda.empty_cache()


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
        self.layers: list[PrefixWeights] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras | None = None
    ) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1).contiguous() for t in (q, k, v))
        self.layers.append(PrefixWeights(k, v))
        n, parts = q.shape[1], []
        if extras is None and q.device.type == "cpu":
            return attend_seen(q, [Own(0, n, k, v)], None).transpose(0, 1)
        # In blocks of queries: the scores of a prefix of 6,000 tokens at once would take gigabytes.
        for start in range(0, n, QUERIES_AT_ONCE):
            end = min(n, start + QUERIES_AT_ONCE)
            hidden = q.new_full((1, end - start, end), OUT_OF_SIGHT).triu(1 + start)
            part = q[None, :, start:end], k[None, :, :end], v[None, :, :end]
            if extras is None:
                parts.append(attend_padded(*part, hidden, None)[0])
            else:
                places = torch.arange(start, end, device=q.device)[None]
                parts.append(attend_with_extras(*part, hidden, None, places, extras)[0])
        return torch.cat(parts, dim=1).transpose(0, 1)


class _Rows:
    """Rows of a pass that are attended to together, padded to the longest: those with one new token, or the others.

    Slots that lie together are read where they are; with gaps between them, the gaps are computed too (they hold
    ended sessions, nobody reads what comes out) unless that is most of the work: then keys and values are gathered.
    """

    def __init__(
        self, cache: KeyValueCache, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> None:
        device = cache.like.device
        low, high = int(slots.min()), int(slots.max()) + 1
        self.width, self.total = int(counts.max()), int((starts + counts).max())
        self.span: slice | None = slice(low, high) if high - low <= 2 * len(slots) else None
        self.slots = torch.from_numpy(slots).to(device)
        self.padded = high - low if self.span else len(slots)
        row = np.repeat(np.arange(len(slots)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        place = slots - low if self.span else np.arange(len(slots))
        at = place[row] * self.width + within  # where a token lies among the padded rows
        ends = np.cumsum(counts)
        places = (slots, ends - counts, ends, starts + counts)  # of each row: slot, its tokens here, tokens when stored
        self.rows = list(zip(*(x.tolist() for x in places), strict=True))
        self.whole = len(at) == self.padded * self.width and bool((at == np.arange(len(at))).all())
        self.at = torch.from_numpy(at).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        # The last key that each query sees. What no session owns sees all: a row without any key would be NaN.
        reach = np.full((self.padded, self.width), self.total)
        reach[place] = starts[:, None] + np.arange(self.width)
        self.reach, self.groups, self.like = torch.from_numpy(reach).to(device), cache.heads, cache.like

    @cached_property
    def each(self) -> torch.Tensor:
        """-inf where a key is out of a query's sight, (rows, width, total); rows in blocks need none."""
        return self._hidden(slice(None), slice(None))

    def _hidden(self, rows: slice, queries: slice) -> torch.Tensor:
        """That part of `each`."""
        blocked = torch.arange(self.total, device=self.reach.device) > self.reach[rows, queries, None]
        return self.like.new_zeros(blocked.shape).masked_fill_(blocked, OUT_OF_SIGHT)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """`each` of rows that decode, once for every key-value head."""
        return self.each.repeat_interleave(self.groups, dim=0)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        prefix: PrefixWeights | None,
        extras: Extras | None = None,
    ) -> torch.Tensor:
        """q (n, H, D) of these rows' tokens, keys and values (slots, Hkv, T, D) of all -> (n, H, D)."""
        if extras is None and self.width >= ROW_BY_ROW and q.device.type == "cpu":
            rows = [Own(a, b, keys[slot, :, :end], values[slot, :, :end]) for slot, a, b, end in self.rows]
            before = (prefix.k, prefix.v) if prefix is not None else None
            return attend_seen(q.transpose(0, 1), rows, before).transpose(0, 1)
        keys, values = keys[:, :, : self.total], values[:, :, : self.total]
        if self.span is not None:
            keys, values = keys[self.span], values[self.span]
        else:
            keys, values = keys.index_select(0, self.slots), values.index_select(0, self.slots)
        heads, dim = q.shape[1:]
        if not self.whole:
            q = q.new_zeros(self.padded * self.width, heads, dim).index_copy_(0, self.at, q)
        padded = q.view(self.padded, self.width, heads, dim).transpose(1, 2)
        before = (prefix.k, prefix.v) if prefix is not None else None
        if extras is None and self.width == 1:
            out = attend_decoding(q, keys, values, self.hidden, prefix)
        else:
            out = self._padded(padded, keys, values, before, extras).transpose(1, 2).reshape(-1, heads, dim)
        return out if self.whole else out.index_select(0, self.at)

    def _padded(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        prefix: tuple[torch.Tensor, torch.Tensor] | None,
        extras: Extras | None,
    ) -> torch.Tensor:
        """`attend_padded`, or `attend_with_extras`, of as many rows and queries at once as their scores have room for.
        q (R, H, L, D) -> (R, H, L, D)."""

        def attend(rows: slice, queries: slice, hidden: torch.Tensor) -> torch.Tensor:
            part = q[rows, :, queries], keys[rows], values[rows], hidden, prefix
            if extras is None:
                return attend_padded(*part)
            return attend_with_extras(*part, self.reach[rows, queries].clamp(max=self.total - 1), extras)

        seen = self.total + (prefix[0].shape[1] if prefix is not None else 0)
        one = q.shape[1] * seen * q.element_size()  # bytes of a query's scores
        in_cache = extras is None and q.device.type == "cpu"  # few queries: rows with many go in blocks
        most, queries = (SCORES_AT_ONCE if in_cache else SCORES_ELSEWHERE), self.width
        if not in_cache:
            queries = max(1, min(queries, most // one))
        rows = max(1, most // (one * queries))
        if rows >= self.padded and queries >= self.width:
            return attend(slice(None), slice(None), self.each)
        out = torch.empty_like(q)
        for first in range(0, self.padded, rows):
            for start in range(0, self.width, queries):
                place = slice(first, first + rows), slice(start, start + queries)
                # `each` is as large as the scores of one head: where they are many, every layer makes its part again.
                hidden = self.each[place] if in_cache else self._hidden(*place)
                out[place[0], :, place[1]] = attend(*place, hidden)
        return out


class RowsPass:
    """Forward pass of new tokens of several rows, laid flat. Stores their keys and values, then attends.

    `slots` (R,) rows of the cache, `starts` tokens stored per row, `counts` new tokens per row. Rows that decode (one
    new token) and rows whose turn begins share the pass: the matrix products see all their tokens at once.
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
        slot, start, count = np.asarray(slots), np.asarray(starts), np.asarray(counts)
        first = np.cumsum(count) - count
        within = np.arange(int(count.sum())) - np.repeat(first, count)
        head = np.arange(cache.heads)
        at = (np.repeat(slot, count)[:, None] * cache.heads + head) * cache.room
        at = at + (np.repeat(start, count) + within)[:, None]
        self.at = torch.from_numpy(at.ravel()).to(cache.like.device)
        self.parts: list[_Rows] = []
        for rows in (np.flatnonzero(count == 1), np.flatnonzero(count > 1)):
            if len(rows):
                tokens = np.concatenate([np.arange(first[r], first[r] + count[r]) for r in rows])
                self.parts.append(_Rows(cache, slot[rows], start[rows], count[rows], tokens))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras | None = None
    ) -> torch.Tensor:
        keys, values = self.cache.store[layer]
        dim = k.shape[-1]
        keys.view(-1, dim).index_copy_(0, self.at, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self.at, v.reshape(-1, dim))
        prefix = self.prefix.layers[layer] if self.prefix else None
        if len(self.parts) == 1:
            return self.parts[0].attend(q, keys, values, prefix, extras)
        out = torch.empty_like(q)
        for part in self.parts:
            mine = q.index_select(0, part.tokens)
            out.index_copy_(0, part.tokens, part.attend(mine, keys, values, prefix, extras))
        return out


@dataclass
class Row:
    """A session's place in the batch. `ids` are the tokens after the prefix whose keys and values are stored;
    `sampling` while a turn is in flight, of at most `most` tokens at `temperature`; `turn` counts the turns of all
    sessions up to its last one."""

    session: str
    adapter: str | None
    prefix: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperature: float = 0.0
    most: int = 0
    draws: np.random.Generator | None = None
    sampling: bool = False
    turn: int = 0

    def begin(self, request: Request, prefix: tuple[int, ...], turn: int) -> None:
        """Begin a turn, with what is already computed of the session."""
        suffix = list(request.prompt[len(prefix) :])
        same = self.adapter == request.adapter and self.prefix == prefix and suffix[: len(self.ids)] == self.ids
        if not same or len(self.ids) == len(suffix):
            self.ids, self.adapter, self.prefix = [], request.adapter, prefix
        self.todo = suffix[len(self.ids) :]
        self.sampled, self.logprobs, self.sampling, self.turn = [], [], True, turn
        self.temperature, self.most = request.sampling.temperature, request.sampling.max_tokens
        self.draws = np.random.default_rng(request.sampling.seed) if request.sampling.temperature > 0 else None

    def take(self, token: int, logprob: float, stop_ids: frozenset[int]) -> Generation | None:
        """Add a sampled token; the turn, where that ends it."""
        self.sampled.append(token)
        self.logprobs.append(logprob)
        self.todo = [token]
        stops = token in stop_ids
        if not stops and len(self.sampled) < self.most:
            return None
        self.sampling = False
        return Generation(self.session, tuple(self.sampled), tuple(self.logprobs), "stop" if stops else "length")


def slot_of(session: str, slots: list[Row | None], most: int) -> int:
    """The slot of a session, or one for it: a free one (there are `most` at most, and one of them is not sampling), or
    that of the session that has waited longest, which is taken."""
    sessions = [None if row is None else row.session for row in slots]
    for wanted in (session, None):
        if wanted in sessions:
            return sessions.index(wanted)
    if len(slots) < most:
        slots.append(None)
        return len(slots) - 1
    # Every slot is held by a session, some between turns: the oldest of those is computed again.
    _, place = min((row.turn, i) for i, row in enumerate(slots) if row is not None and not row.sampling)
    slots[place] = None
    return place


def seat(request: Request, prefix: tuple[int, ...], turn: int, slots: list[Row | None], most: int) -> int:
    """Give a turn a slot, with what is already computed of its session; the slot."""
    place = slot_of(request.session, slots, most)
    slots[place] = row = slots[place] or Row(request.session, request.adapter, prefix)
    row.begin(request, prefix, turn)
    return place


def common_prefix(ids_RT: Sequence[list[int]] | Sequence[tuple[int, ...]]) -> int:
    """How many leading ids all rows share."""
    first, last = min(ids_RT), max(ids_RT)  # what the two furthest apart share, all do
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def waits(request: Request, prefix: tuple[int, ...], slots: Sequence[Row | None]) -> bool:
    """Whether a turn had better begin a pass later: when a row of the next one has more than half of what is new in
    it. So the rollouts of a group, which are asked for together, compute their prompt once."""
    like = [r for r in slots if r is not None and (r.adapter, r.prefix) == (request.adapter, prefix)]
    if not (begin := [row for row in like if row.sampling and len(row.todo) >= LEAST_ALIKE]):
        return False
    suffix = list(request.prompt[len(prefix) : -1])
    stored = max(common_prefix([row.ids, suffix]) for row in like)
    coming = max(common_prefix([row.ids + row.todo, suffix]) for row in begin)
    return coming - stored >= max(LEAST_ALIKE, (len(suffix) - stored) / 2)


def take_over(cache: KeyValueCache, seated: Sequence[int], slots: Sequence[Row | None]) -> None:
    """Have the rows of these slots, whose turns begin, take over what rows of other slots hold of the same tokens."""
    copies, longest = list[tuple[int, int]](), 0
    for slot, row in ((slot, row) for slot in seated if (row := slots[slot]) is not None):
        suffix = row.ids + row.todo
        alike = {
            place: min(common_prefix([other.ids, suffix]), len(suffix) - 1)
            for place, other in enumerate(slots)
            if other is not None and place not in seated and (other.adapter, other.prefix) == (row.adapter, row.prefix)
        }
        source = max(alike, key=alike.__getitem__, default=slot)
        if source != slot and alike[source] - len(row.ids) >= LEAST_ALIKE:
            copies.append((source, slot))
            longest = max(longest, alike[source])
            row.ids, row.todo = suffix[: alike[source]], suffix[alike[source] :]
    if copies:
        cache.copy(copies, longest)
