"""The `local` policy backend: many episodes in flight on one model in this process.

What it does beyond `model.generate`: the prefix that requests share (instructions and worked examples) is computed
once per adapter; a session's keys and values stay between its turns, so that each turn computes only what is new, and
of that nothing that another row holds already; finished rows leave the batch at once and waiting ones take their
place, their first tokens in the same pass as the others' next ones; the pass itself is cut down to its matrix products
(`models/local/decoder.py`) and shared by cores (`models/local/threads.py`). What it returns are exactly the sampled ids
and their log-probabilities.

Not covered: beam search, top-p and top-k (the trained distribution must be the sampled one), and the architectures
that `models/local/shapes.py` names (loading one raises).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from errors import NotFinite, PolicyError
from models.adapters.deltas import Delta, folder_deltas
from models.local.attention import SharedBatch, check_supported
from models.local.decoder import make_decoder
from models.local.drawing import draw
from models.local.kv_cache import KeyValueCache, PrefixPass, Row, RowsPass, seat, take_over, waits
from models.local.packed import base_alone, merge
from models.local.threads import cut, most_parts, side_by_side
from models.policy import Generation, PolicyIdentity, Request, Sampling
from models.work import Work

# How many shared prefixes are kept (each is layers x 2 x Hkv x P x D numbers).
PREFIXES_KEPT = 8
# Rows of a part of the batch at least: fewer are sooner done by all threads together.
LEAST_ROWS = 8

T = TypeVar("T")


class LocalPolicy:
    """Token policy on a transformers causal language model in this process.

    `model` must have been loaded with `attn_implementation=models.local.attention.NAME`. `rows` is the number of
    episodes in flight. Adapters are given as deltas by module name (`models/adapters/deltas.py`). `work` counts what
    was computed.
    """

    def __init__(self, model: nn.Module, identity: PolicyIdentity, stop_ids: frozenset[int], rows: int = 48) -> None:
        config: Any = model.config
        check_supported(config)
        self.model: Any = model  # transformers' models carry more than nn.Module declares
        self.stop_ids, self.rows = stop_ids, rows
        self.decoder = make_decoder(model)
        self._identity = identity
        self._adapters: dict[str, tuple[str, dict[str, Delta]]] = {}
        self._current: str | None = None
        self._merged: set[str] = set()
        like = next(model.parameters())
        self._cache = KeyValueCache(config, rows, torch.empty(0, dtype=like.dtype, device=like.device))
        self.context = self._cache.most
        self._prefixes: OrderedDict[tuple[str | None, tuple[int, ...]], PrefixPass] = OrderedDict()
        self._slots: list[Row | None] = []  # slot i of the cache; a row keeps its slot until its session is forgotten
        self._queue: deque[Request] = deque()
        self.work = Work()
        self.sampled_tokens = 0
        self._turns = 0

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        """Identity with the adapter's content hash."""
        return replace(self._identity, adapter="" if adapter is None else self._adapter(adapter)[0])

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def _adapter(self, name: str) -> tuple[str, dict[str, Delta]]:
        try:
            return self._adapters[name]
        except KeyError:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise PolicyError(f"adapter {name!r} is not loaded (loaded: {known}); load it first") from None

    def adapter_name(self, capability: str, origin: str, digest: str) -> str:
        """The capability and the adapter's digest: two versions of one capability can be loaded side by side."""
        return f"{capability}@{digest[:8]}"

    def load_adapter(self, name: str, digest: str, folder: Path) -> None:
        """Make a PEFT folder available as `name`; same name = replaced."""
        self.load_deltas(name, digest, folder_deltas(folder)[1])

    def load_deltas(self, name: str, digest: str, deltas: Mapping[str, Delta]) -> None:
        """Make `deltas` (by module name) available as `name`; same name = replaced."""
        if unknown := [key for key in deltas if key not in self.decoder.layers]:
            raise PolicyError(f"adapter {name!r} changes {unknown[0]!r}, which this model does not have")
        self._check_unused(name)
        self._adapters[name] = (digest, dict(deltas))
        self._forget(name)

    def unload_adapter(self, name: str) -> None:
        """Forget the adapter and everything computed with it; only while no turn of it is in flight."""
        self._adapter(name)
        self._check_unused(name)
        self._forget(name)
        del self._adapters[name]

    def _check_unused(self, name: str) -> None:
        if name in {request.adapter for request in self._queue} | {row.adapter for row in self._sampling()}:
            raise PolicyError(f"adapter {name!r} is answering requests; wait until they are done")

    def _forget(self, adapter: str) -> None:
        for key in [key for key in self._prefixes if key[0] == adapter]:
            del self._prefixes[key]
        for row in self._slots:
            if row is not None and row.adapter == adapter:
                self.release(row.session)
        if self._current == adapter:
            self._use(None)

    def submit(self, request: Request) -> None:
        """Queue one turn. Raises `ContextOverflow` before the first token if it cannot fit."""
        if request.adapter is not None:
            self._adapter(request.adapter)
        request.check(self.context, "shorten the instructions or use a model with a longer context")
        # At least the last token is the row's own: its hidden state is what the first draw needs.
        self._queue.append(replace(request, shared=min(request.shared, len(request.prompt) - 1)))

    def release(self, session: str) -> None:
        """Forget a session that is not sampling."""
        for slot, row in enumerate(self._slots):
            if row is not None and row.session == session and not row.sampling:
                self._slots[slot] = None

    def free_buffers(self) -> None:
        """Give the memory of keys and values back, and on a GPU that of the weights with an adapter merged; only while
        nothing is in flight. It is taken again when needed."""
        self._at_rest("free_buffers")
        self._give_back()

    def close(self) -> None:
        """End what is in flight and give its memory back. Model and adapters stay: training and routing use them."""
        self._queue.clear()
        self._give_back()

    def _give_back(self) -> None:
        self._slots.clear()
        self._prefixes.clear()
        if self._cache.like.device.type != "cpu":  # a CPU would have to arrange them anew
            self._use(None)
        self._cache.clear()

    def poll(self) -> list[Generation]:
        """Compute until at least one turn is finished; [] when nothing is in flight."""
        while self.busy:
            if finished := self.step():
                return finished
        return []

    @property
    def busy(self) -> bool:
        """Whether any turn is in flight."""
        return bool(self._queue) or any(True for _ in self._sampling())

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """One forward pass: the turns that it finished. For a server that sends tokens as they come. Raises `NotFinite`
        where what it has computed is no number: then the turns in the batch end without an answer."""
        self._admit()
        return self._run_and_sample()

    def sampled(self) -> dict[str, list[int]]:
        """What the turns in the batch have sampled so far, by session."""
        return {row.session: row.sampled for row in self._sampling()}

    def cancel(self, session: str) -> None:
        """End a session's turn, if it is in flight, without an answer, and forget the session."""
        self._queue = deque(request for request in self._queue if request.session != session)
        for row in self._sampling():
            if row.session == session:
                row.sampling = False
        self.release(session)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Finish all `requests` and return the answers in their order. Where a `step` raises, none stays in flight."""
        done: dict[str, Generation] = {}
        try:
            for request in requests:
                self.submit(request)
            while len(done) < len(requests):
                done |= {generation.session: generation for generation in self.poll()}
        finally:
            for request in requests:
                self.cancel(request.session)
        return [done[request.session] for request in requests]

    @torch.inference_mode()
    def next_logprobs(self, prompt: Sequence[int], shared: int = 0, adapter: str | None = None) -> torch.Tensor:
        """Log-probabilities (vocabulary,) of the token after `prompt`; only while nothing is in flight."""
        self._at_rest("next_logprobs")
        request = Request("next_logprobs", prompt, Sampling(0.0, 1), adapter, shared)
        self.submit(request)
        self._admit()
        (((row,), logits),) = self._run(lambda rows, hidden: self.decoder.head(hidden).float()[0])
        if logits.isnan().any():
            raise self._come_apart()
        row.sampling = False
        self.release("next_logprobs")
        return torch.log_softmax(logits, dim=-1)

    @torch.inference_mode()
    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]:
        """Log-probabilities (nats, temperature 1) of the last `count` of `ids`; only while nothing is in flight."""
        self._at_rest("score")
        before = len(ids) - count - 1  # the token at `before` gives the first draw to be scored
        if count < 1 or before < 0 or len(ids) > self.context:
            raise PolicyError(f"cannot score the last {count} of {len(ids)} tokens; give at least one more before them")
        self._use(adapter)
        hidden = self._rows_after([ids[before:-1]], before, self._prefix(adapter, tuple(ids[:before])))
        logprobs = torch.log_softmax(self.head(hidden).float(), dim=-1)
        wanted = torch.tensor(list(ids[before + 1 :]), device=logprobs.device)
        scored: list[float] = logprobs.gather(1, wanted[:, None])[:, 0].tolist()
        return scored

    @torch.inference_mode()
    def forward_rows(
        self, rows: Sequence[Sequence[int]], prefix: Sequence[int] = (), layers: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Hidden states (N, hidden) of the base model for the tokens of `rows`, laid flat, each row after the shared
        `prefix`: the last ones, or the mean over decoder layers `layers` (first and last, from 1).
        Keys and values lie beside those of the sessions, which stay as they are."""
        counts = [len(row) for row in rows]
        if not counts or not all(counts) or len(prefix) + max(counts) > self.context:
            raise PolicyError(
                f"rows of {counts} tokens after {len(prefix)}: give 1 to {self.context - len(prefix)} tokens a row"
            )
        with base_alone(self.decoder.layers, self._merged):
            shared = self._prefix(None, tuple(prefix))
            return self._rows_after(rows, len(prefix), shared, layers)

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (N, vocabulary) of hidden states (N, hidden)."""
        self.work.heads += len(hidden)
        return self.decoder.head(hidden)

    def _rows_after(
        self,
        rows: Sequence[Sequence[int]],
        offset: int,
        shared: PrefixPass | None,
        layers: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Hidden states (N, hidden) of `rows` laid flat, after a prefix of `offset` tokens. Nothing is kept."""
        counts = [len(row) for row in rows]
        cache = KeyValueCache(self.model.config, len(rows), self._cache.like, max(counts))
        cache.reserve(max(counts))
        batch = RowsPass(cache, range(len(rows)), [0] * len(rows), counts, shared)
        positions = [offset + j for count in counts for j in range(count)]
        self.work.prefilled += len(positions)
        self.work.seen_prefilling += sum(positions) + len(positions)
        return self._forward([i for row in rows for i in row], positions, batch, layers)

    def _at_rest(self, what: str) -> None:
        if self.busy:
            raise PolicyError(f"{what} while turns are in flight; finish them first")

    # --- scheduling -------------------------------------------------------------------------------------------

    def _sampling(self) -> Iterator[Row]:
        """The rows whose turn is in flight, by slot."""
        return (row for row in self._slots if row is not None and row.sampling)

    def _admit(self) -> None:
        """Move waiting requests into free places of the batch, which has one adapter and one prefix."""
        if not self._queue:
            return
        active = next(self._sampling(), None)
        first = self._queue[0]
        key = (active.adapter, active.prefix) if active else (first.adapter, tuple(first.prompt[: first.shared]))
        free = self.rows - sum(1 for _ in self._sampling())
        skipped, seated, longest = deque[Request](), list[int](), 0  # tokens of a row
        while self._queue and free:
            request = self._queue.popleft()
            other = (request.adapter, tuple(request.prompt[: request.shared])) != key
            if other or waits(request, key[1], self._slots):
                skipped.append(request)
                continue
            self._turns += 1
            seated.append(seat(request, key[1], self._turns, self._slots, self.rows))
            longest = max(longest, len(request.prompt) - len(key[1]) + request.sampling.max_tokens)
            free -= 1
        self._queue.extendleft(reversed(skipped))
        if longest:  # once for all that were seated: the store grows but once
            self._cache.reserve(longest, [len(row.ids) if row is not None else 0 for row in self._slots])
            take_over(self._cache, seated, self._slots)

    # --- computing --------------------------------------------------------------------------------------------

    def _use(self, adapter: str | None) -> None:
        if adapter != self._current:
            deltas = self._adapter(adapter)[1] if adapter is not None else {}
            self._merged = merge(self.decoder.layers, self._merged, deltas)
            self._current = adapter

    def _prefix(self, adapter: str | None, ids: tuple[int, ...]) -> PrefixPass | None:
        if not ids:
            return None
        key = (adapter, ids)
        if key not in self._prefixes:
            shared = PrefixPass()
            self.work.prefilled += len(ids)
            self.work.seen_prefilling += len(ids) * (len(ids) + 1) // 2
            self._forward(ids, range(len(ids)), shared)
            self._prefixes[key] = shared
            while len(self._prefixes) > PREFIXES_KEPT:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(key)
        return self._prefixes[key]

    def _forward(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        shared: SharedBatch,
        layers: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Hidden states (N, hidden) of N flat tokens: the last ones, or the mean over `layers`."""
        device = self._cache.like.device
        ids_N, positions_N = torch.tensor(ids, device=device), torch.tensor(positions, device=device)
        return self.decoder.run(ids_N, positions_N, shared, layers)

    def _run(self, read: Callable[[list[Row], torch.Tensor], T]) -> list[tuple[list[Row], T]]:
        """Compute `todo` of the rows in flight, in parts side by side: the rows of each part, and what `read` makes of
        them and of the hidden states (R, hidden) of their last tokens."""
        places = [(slot, row) for slot, row in enumerate(self._slots) if row is not None and row.sampling]
        first = places[0][1]
        self._use(first.adapter)
        prefix = self._prefix(first.adapter, first.prefix)
        parts = self._parts(places)
        self.work.count((len(row.prefix) + len(row.ids), len(row.todo)) for _, row in places)

        def compute(part: Sequence[tuple[int, Row]]) -> T:
            rows = [row for _, row in part]
            offset, starts, counts = len(rows[0].prefix), [len(r.ids) for r in rows], [len(r.todo) for r in rows]
            batch = RowsPass(self._cache, [slot for slot, _ in part], starts, counts, prefix)
            positions = [offset + s + j for s, c in zip(starts, counts, strict=True) for j in range(c)]
            hidden = self._forward([i for r in rows for i in r.todo], positions, batch)
            return read(rows, hidden[torch.tensor(counts).cumsum(0) - 1] if len(hidden) > len(rows) else hidden)

        made = side_by_side([partial(compute, part) for part in parts])
        for _, row in places:
            row.ids, row.todo = row.ids + row.todo, []
        return [([row for _, row in part], value) for part, value in zip(parts, made, strict=True)]

    def _parts(self, places: list[tuple[int, Row]]) -> list[list[tuple[int, Row]]]:
        """The rows in parts that gain from being computed side by side, neighbours together."""
        many = min(most_parts(), len(places) // LEAST_ROWS) if self.decoder.divisible else 1
        if many < 2 or self._cache.like.device.type != "cpu":
            return [places]
        for layer in self.decoder.layers.values():  # arranged once, by all threads
            _ = layer.packed.weight
        return [places[part] for part in cut([1 + len(row.todo) for _, row in places], many)]

    def _run_and_sample(self) -> list[Generation]:
        """One more token for each turn in flight; the turns that this finished."""
        if not any(True for _ in self._sampling()):
            return []

        def drawn(rows: list[Row], hidden: torch.Tensor) -> tuple[list[int], list[float]]:
            uniform = [row.draws.random() if row.draws is not None else None for row in rows]
            return draw(self.decoder.head(hidden), [row.temperature for row in rows], uniform)

        made, finished = self._run(drawn), list[Generation]()
        if not all(isfinite(value) for _, (_, logprobs) in made for value in logprobs):
            raise self._come_apart()
        for rows, (chosen, logprobs) in made:
            self.sampled_tokens += len(rows)
            for row, token, value in zip(rows, chosen, logprobs, strict=True):
                if ended := row.take(token, value, self.stop_ids):
                    finished.append(ended)
        return finished

    def _come_apart(self) -> NotFinite:
        """End the turns in flight, whose pass was not finite, and forget their sessions; the error that says so."""
        over = {slot for slot, row in enumerate(self._slots) if row is not None and row.sampling}
        self._cache.wipe(over)
        self._slots = [None if slot in over else row for slot, row in enumerate(self._slots)]
        whose = "the base model" if self._current is None else f"adapter {self._current!r}"
        return NotFinite(
            f"{whose} gives log-probabilities that are not finite in {self._identity.dtype}: its weights have come "
            "apart; use an earlier one, or another"
        )
