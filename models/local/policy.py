"""The `local` policy backend: many episodes in flight on one model in this process.

What it does beyond `model.generate`: the prefix that requests share (instructions and worked examples) is computed
once per adapter; a session's keys and values stay between its turns, so that each turn computes only what is new;
finished rows leave the batch at once and waiting ones take their place; linear weights are arranged for decoding
(`models/local/packed.py`). What it returns are exactly the sampled ids and their log-probabilities.

Not covered: beam search, top-p and top-k (the trained distribution must be the sampled one), sliding-window or
linear-attention models (their layers do not go through the attention interface; loading one raises).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from errors import PolicyError
from models.adapters.deltas import folder_deltas
from models.local.attention import check_supported
from models.local.kv_cache import KeyValueCache, PrefixPass, Row, RowsPass
from models.local.layer_mean import LayerMean
from models.local.packed import SamplerTwin
from models.policy import Generation, PolicyIdentity, Request, Sampling

# How many shared prefixes are kept (each is layers x 2 x Hkv x P x D numbers).
PREFIXES_KEPT = 8


class LocalPolicy:
    """Token policy on a transformers causal language model in this process.

    `model` must have been loaded with `attn_implementation=models.local.attention.NAME`. `rows` is the number of
    episodes in flight. Adapters are given as deltas by module name (`models/adapters/deltas.py`).
    """

    def __init__(self, model: nn.Module, identity: PolicyIdentity, stop_ids: frozenset[int], rows: int = 48) -> None:
        config: Any = model.config
        check_supported(config)
        self.model: Any = model  # transformers' models carry more than nn.Module declares
        self.stop_ids, self.rows = stop_ids, rows
        self.context = int(config.max_position_embeddings)
        self.twin = SamplerTwin(model)
        self._identity = identity
        self._adapters: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
        self._current: str | None = None
        like = next(model.parameters())
        self._cache = KeyValueCache(config, rows, torch.empty(0, dtype=like.dtype, device=like.device))
        self._prefixes: OrderedDict[tuple[str | None, tuple[int, ...]], PrefixPass] = OrderedDict()
        self._slots: list[Row] = []  # slot i of the cache; the first `_active` are sampling, the rest wait for a turn
        self._active = 0
        self._queue: deque[Request] = deque()
        self.sampled_tokens = 0
        self.computed_tokens = 0

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        """Identity with the adapter's content hash."""
        return replace(self._identity, adapter="" if adapter is None else self._adapter(adapter)[0])

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def _adapter(self, name: str) -> tuple[str, dict[str, torch.Tensor]]:
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

    def load_deltas(self, name: str, digest: str, deltas: Mapping[str, torch.Tensor]) -> None:
        """Make `deltas` (module name -> (out, in), already scaled) available as `name`; same name = replaced."""
        unknown = [key for key in deltas if key not in self.twin.layers]
        if unknown:
            raise PolicyError(f"adapter {name!r} changes {unknown[0]!r}, which this model does not have")
        if any(row.adapter == name for row in self._slots[: self._active]):
            raise PolicyError(f"adapter {name!r} is answering requests; wait until they are done")
        self._adapters[name] = (digest, dict(deltas))
        self._forget(name)

    def unload_adapter(self, name: str) -> None:
        """Forget the adapter and everything computed with it."""
        self._adapter(name)
        self._forget(name)
        del self._adapters[name]

    def _forget(self, adapter: str) -> None:
        for key in [key for key in self._prefixes if key[0] == adapter]:
            del self._prefixes[key]
        for row in [row for row in self._slots[self._active :] if row.adapter == adapter]:
            self.release(row.session)
        if self._current == adapter:
            self._current = None
            self.twin.merge({})

    def submit(self, request: Request) -> None:
        """Queue one turn. Raises `ContextOverflow` before the first token if it cannot fit."""
        if request.adapter is not None:
            self._adapter(request.adapter)
        request.check(self.context, "shorten the instructions or use a model with a longer context")
        # At least the last token is the row's own: its hidden state is what the first draw needs.
        self._queue.append(replace(request, shared=min(request.shared, len(request.prompt) - 1)))

    @torch.inference_mode()
    def release(self, session: str) -> None:
        """Forget a session that is not sampling."""
        for slot in range(self._active, len(self._slots)):
            if self._slots[slot].session == session:
                last = len(self._slots) - 1
                if slot != last:
                    self._cache.copy(last, slot, len(self._slots[last].ids))
                    self._slots[slot] = self._slots[last]
                self._slots.pop()
                return

    def free_buffers(self) -> None:
        """Give the memory of keys and values back; only while nothing is in flight. It is taken again when needed."""
        self._at_rest("free_buffers")
        self._slots.clear()
        self._prefixes.clear()
        self._cache.clear()

    def close(self) -> None:
        """End what is in flight and give its memory back. Model and adapters stay: training and routing use them."""
        self._queue.clear()
        self._active = 0
        self.free_buffers()

    def poll(self) -> list[Generation]:
        """Compute until at least one turn is finished; [] when nothing is in flight."""
        while self.busy:
            if finished := self.step():
                return finished
        return []

    @property
    def busy(self) -> bool:
        """Whether any turn is in flight."""
        return bool(self._queue or self._active)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """One forward pass: the turns that it finished. For a server that sends tokens as they come."""
        started = self._admit()
        return self._run_and_sample(started or list(range(self._active)))

    def sampled(self) -> dict[str, list[int]]:
        """What the turns in the batch have sampled so far, by session."""
        return {row.session: row.sampled for row in self._slots[: self._active]}

    @torch.inference_mode()
    def cancel(self, session: str) -> None:
        """End a session's turn, if it is in flight, without an answer, and forget the session."""
        self._queue = deque(request for request in self._queue if request.session != session)
        for slot in range(self._active):
            if self._slots[slot].session == session:
                self._retire([slot])
                break
        self.release(session)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Finish all `requests` and return the answers in the order of the requests."""
        for request in requests:
            self.submit(request)
        done: dict[str, Generation] = {}
        while len(done) < len(requests):
            done |= {generation.session: generation for generation in self.poll()}
        for request in requests:
            self.release(request.session)
        return [done[request.session] for request in requests]

    @torch.inference_mode()
    def next_logprobs(self, prompt: Sequence[int], shared: int = 0, adapter: str | None = None) -> torch.Tensor:
        """Log-probabilities (vocabulary,) of the token after `prompt`; only while nothing is in flight."""
        self._at_rest("next_logprobs")
        request = Request("next_logprobs", prompt, Sampling(0.0, 1), adapter, shared)
        self.submit(request)
        slots = self._admit()
        logits = self.twin.model.lm_head(self._run(slots)).float()[0]
        self._active -= 1
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
        logprobs = torch.log_softmax(self.twin.model.lm_head(hidden).float(), dim=-1)
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
        # An adapter that is merged stays: changing the merged weights costs more than the plain model's slower layers.
        model = self.twin.model if self._current is None else self.model
        shared = self._prefix(None, tuple(prefix), model)
        if layers is None:
            return self._rows_after(rows, len(prefix), shared, model)
        with LayerMean(model.model, *layers) as states:
            self._rows_after(rows, len(prefix), shared, model)
        return states.mean

    def _rows_after(
        self, rows: Sequence[Sequence[int]], offset: int, shared: PrefixPass | None, model: Any = None
    ) -> torch.Tensor:
        """Last hidden states (N, hidden) of `rows` laid flat, after a prefix of `offset` tokens. Nothing is kept."""
        counts = [len(row) for row in rows]
        cache = KeyValueCache(self.model.config, len(rows), self._cache.like)
        cache.reserve(max(counts))
        batch = RowsPass(cache, range(len(rows)), [0] * len(rows), counts, shared)
        positions = [offset + j for count in counts for j in range(count)]
        return self._forward([i for row in rows for i in row], positions, batch, model)

    def _at_rest(self, what: str) -> None:
        if self._active or self._queue:
            raise PolicyError(f"{what} while turns are in flight; finish them first")

    # --- scheduling -------------------------------------------------------------------------------------------

    def _admit(self) -> list[int]:
        """Move waiting requests into the batch; their slots, or [] if decoding should go on first.

        One batch has one adapter and one prefix. New rows are prefilled together: at once when the batch is empty, else
        when a quarter of it is free for them, because each prefill interrupts the others.
        """
        if not self._queue:
            return []
        if self._active:
            key = (self._slots[0].adapter, self._slots[0].prefix)
            fitting = sum(1 for r in self._queue if (r.adapter, tuple(r.prompt[: r.shared])) == key)
            if not fitting or (fitting < self.rows // 4 and self._active > self.rows // 2):
                return []
        else:
            first = self._queue[0]
            key = (first.adapter, tuple(first.prompt[: first.shared]))
        started, skipped = [], deque[Request]()
        while self._queue and self._active < self.rows:
            request = self._queue.popleft()
            if (request.adapter, tuple(request.prompt[: request.shared])) != key:
                skipped.append(request)
                continue
            started.append(self._seat(request, key[1]))
        self._queue.extendleft(reversed(skipped))
        return started

    def _seat(self, request: Request, prefix: tuple[int, ...]) -> int:
        """Give the request the slot at the end of the active ones, with what is already computed of its session."""
        place = next(
            (i for i in range(self._active, len(self._slots)) if self._slots[i].session == request.session), None
        )
        if place is None:
            if len(self._slots) == self.rows:
                # Every slot is held by a session between turns: the oldest is computed again.
                self.release(self._slots[self._active].session)
            place = len(self._slots)
            self._slots.append(Row(request.session, request.adapter, prefix))
        row = self._slots[place]
        suffix = list(request.prompt[len(prefix) :])
        same = row.adapter == request.adapter and row.prefix == prefix and suffix[: len(row.ids)] == row.ids
        if not same or len(row.ids) == len(suffix):
            row.ids, row.adapter, row.prefix = [], request.adapter, prefix
        row.todo = suffix[len(row.ids) :]
        row.sampled, row.logprobs, row.request = [], [], request
        row.draws = np.random.default_rng(request.sampling.seed) if request.sampling.temperature > 0 else None
        self._cache.reserve(len(suffix) + request.sampling.max_tokens, [len(r.ids) for r in self._slots])
        if place != self._active:
            other = self._slots[self._active]
            self._cache.swap(place, self._active, max(len(row.ids), len(other.ids)))
            self._slots[place], self._slots[self._active] = other, row
        self._active += 1
        return self._active - 1

    def _retire(self, slots: list[int]) -> list[Generation]:
        """Take finished rows out of the active part of the batch."""
        finished = []
        for slot in sorted(slots, reverse=True):
            row = self._slots[slot]
            assert row.request is not None
            reason = "stop" if row.sampled[-1] in self.stop_ids else "length"
            finished.append(Generation(row.session, tuple(row.sampled), tuple(row.logprobs), reason))
            self._active -= 1
            if slot != self._active:
                other = self._slots[self._active]
                self._cache.swap(slot, self._active, max(len(row.ids), len(other.ids)))
                self._slots[slot], self._slots[self._active] = other, row
        return finished[::-1]

    # --- computing --------------------------------------------------------------------------------------------

    def _use(self, adapter: str | None) -> None:
        if adapter != self._current:
            self.twin.merge(self._adapter(adapter)[1] if adapter is not None else {})
            self._current = adapter

    def _prefix(self, adapter: str | None, ids: tuple[int, ...], model: Any = None) -> PrefixPass | None:
        if not ids:
            return None
        key = (adapter, ids)
        if key not in self._prefixes:
            shared = PrefixPass()
            self._forward(ids, range(len(ids)), shared, model)
            self._prefixes[key] = shared
            while len(self._prefixes) > PREFIXES_KEPT:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(key)
        return self._prefixes[key]

    def _forward(self, ids: Sequence[int], positions: Sequence[int], shared: object, model: Any = None) -> torch.Tensor:
        """Last hidden states (N, hidden) of N flat tokens, by the twin unless `model` is given."""
        device = self._cache.like.device
        self.computed_tokens += len(ids)
        return (
            (model or self.twin.model)
            .model(
                input_ids=torch.tensor([list(ids)], device=device),
                position_ids=torch.tensor([list(positions)], device=device),
                use_cache=False,
                shared=shared,
            )
            .last_hidden_state[0]
        )

    def _run(self, slots: list[int]) -> torch.Tensor:
        """Compute `todo` of the rows; hidden state (R, hidden) of each row's last token."""
        rows = [self._slots[s] for s in slots]
        self._use(rows[0].adapter)
        prefix = self._prefix(rows[0].adapter, rows[0].prefix)
        offset = len(rows[0].prefix)
        starts, counts = [len(r.ids) for r in rows], [len(r.todo) for r in rows]
        batch = RowsPass(self._cache, slots, starts, counts, prefix)
        ids = [i for r in rows for i in r.todo]
        positions = [offset + s + j for s, c in zip(starts, counts, strict=True) for j in range(c)]
        hidden = self._forward(ids, positions, batch)
        for row in rows:
            row.ids += row.todo
            row.todo = []
        return hidden[torch.tensor(counts).cumsum(0) - 1]

    def _run_and_sample(self, slots: list[int]) -> list[Generation]:
        """One more token for each of `slots`; the turns that this finished."""
        if not slots:
            return []
        hidden = self._run(slots)
        rows = [self._slots[s] for s in slots]
        logits = self.twin.model.lm_head(hidden).float()
        temperatures = [r.request.sampling.temperature for r in rows if r.request]
        scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits.device)
        logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
        chosen = logprobs.argmax(dim=-1)
        drawn = [i for i, t in enumerate(temperatures) if t > 0]
        if drawn:
            # One uniform number per row and step, from the row's own generator: inverse of the cumulative distribution.
            uniform = torch.tensor([rows[i].draws.random() for i in drawn], device=logits.device)  # type: ignore[union-attr]
            cumulative = logprobs[drawn].exp().cumsum(dim=-1)
            picked = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
            chosen[drawn] = picked.clamp_(max=logits.shape[1] - 1)
        values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        done = []
        for slot, row, token, value in zip(slots, rows, chosen.tolist(), values, strict=True):
            row.sampled.append(token)
            row.logprobs.append(value)
            row.todo = [token]
            assert row.request is not None
            if token in self.stop_ids or len(row.sampled) >= row.request.sampling.max_tokens:
                done.append(slot)
        self.sampled_tokens += len(rows)
        return self._retire(done)
