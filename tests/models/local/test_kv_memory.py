"""What sampling takes of memory: room for keys and values, scores at once, and what is given back.

The device "meta" stands for a GPU: its tensors have shapes and no data.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.adapters.deltas import Delta
from models.local import kv_cache
from models.local.attention import Extras
from models.local.kv_cache import KeyValueCache, PrefixPass, RowsPass, room_for
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity, Request, Sampling
from tests.shapes_made import tiny_model
from tests.tokenizers_trained import random_ids

LAYERS, CONTEXT = 3, 500


def cache_on(device: str, slots: int = 64, context: int = CONTEXT) -> KeyValueCache:
    config = SimpleNamespace(
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        max_position_embeddings=context,
    )
    return KeyValueCache(config, slots, torch.empty(0, device=device))


class Gpu:
    """Stands for CUDA's allocator: counts how often torch was asked to give back what it keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given_back = 0
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.empty_cache", self._count)

    def _count(self) -> None:
        self.given_back += 1


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[LocalPolicy, Gpu]:
    model = tiny_model("llama").to("meta")
    return LocalPolicy(model, PolicyIdentity("tiny", "1", "float32", "", ""), frozenset(), 64), Gpu(monkeypatch)


def test_growing_keeps_what_the_rows_hold() -> None:
    cache = cache_on("cpu", slots=3)
    cache.reserve(10)
    cache.store[0][0, 0, :, :7] = 3.0
    cache.store[1][1, 1, :, :2] = 4.0
    cache.reserve(400, [7, 2])
    assert cache.room >= 400
    assert cache.store[0][0, 0, :, :7].eq(3.0).all()
    assert cache.store[1][1, 1, :, :2].eq(4.0).all()
    assert not cache.store[0][0, 0, :, 7:].any()


def test_room_ends_where_the_context_does() -> None:
    """Half as much again as was asked for is of no use to a row that cannot become so long."""
    assert [room_for(length, CONTEXT) for length in (10, 100, 400, CONTEXT)] == [64, 160, CONTEXT, CONTEXT]
    cache = cache_on("cpu")
    cache.reserve(400)
    assert (cache.room, cache.store[0].shape[3]) == (CONTEXT, CONTEXT)


@pytest.mark.parametrize(("device", "slots"), [("cpu", [64, 64, 64, 64]), ("meta", [1, 3, 3, 4])])
def test_slots_grow_with_those_in_use_where_memory_is_taken_at_once(device: str, slots: list[int]) -> None:
    cache, found = cache_on(device), []
    for length, used in ((10, [0]), (10, [5, 0, 0]), (300, [5, 0]), (300, [5, 0, 9, 0])):
        cache.reserve(length, used)
        found.append(cache.store[0].shape[1])
    assert found == slots
    assert cache.room >= 300


@pytest.mark.parametrize(("used", "together"), [([0, 0], 0), ([7, 0], LAYERS)])
def test_the_old_store_goes_before_the_new_one_comes(
    monkeypatch: pytest.MonkeyPatch, used: list[int], together: int
) -> None:
    """All of it where nothing in it is used, else layer by layer: of so many layers there was a tensor at any time."""
    gpu, cache, made = Gpu(monkeypatch), cache_on("meta"), list[weakref.ref[torch.Tensor]]()
    before, most = kv_cache._zeros, 0

    def zeros(*given: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in made[:LAYERS]) + len(made) - LAYERS)
        tensor = before(*given)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(kv_cache, "_zeros", zeros)
    cache.reserve(10, [0, 0])
    most, given_back = 0, gpu.given_back
    cache.reserve(200, used)
    assert most == max(together, LAYERS - 1)
    assert len(cache.store) == LAYERS
    assert gpu.given_back > given_back, "what torch keeps of the old one fits nothing"


def test_turns_that_begin_together_take_room_for_all_of_them_once(
    on_gpu: tuple[LocalPolicy, Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = on_gpu
    asked: list[tuple[int, ...]] = []
    before = kv_cache._zeros
    monkeypatch.setattr(kv_cache, "_zeros", lambda like, shape: asked.append(shape) or before(like, shape))
    for turn in range(5):
        policy.submit(Request(f"t{turn}", random_ids(turn, 20 + turn), Sampling(0.0, 300)))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):  # a draw needs data
        policy.step()
    assert asked == [(2, 5, 1, policy.context, 32)] * 2


def test_freed_buffers_are_given_back_to_the_gpu_with_the_merged_weights(on_gpu: tuple[LocalPolicy, Gpu]) -> None:
    policy, gpu = on_gpu
    name = "model.layers.1.mlp.up_proj"
    policy.load_deltas("refund", "1", {name: Delta.dense(torch.zeros(96, 64))})
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        policy.score(random_ids(1, 9), 3, "refund")
    packed = policy.decoder.layers[name].packed
    assert packed.deltas
    gpu.given_back = 0
    policy.free_buffers()
    assert gpu.given_back
    assert not packed.deltas
    assert packed.weight is packed.bases[0], "no copy of it is held"
    assert policy.adapters == ("refund",)


def passed(device: str, extras: Extras | None, counts: list[int]) -> torch.Tensor:
    """Attention of rows with so many new tokens behind a prefix of 6 and 2 stored tokens each."""
    draws = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws).to(device)

    cache = cache_on(device, len(counts))
    cache.reserve(40)
    prefix = PrefixPass()
    prefix.attend(0, random(6, 4, 8), random(6, 2, 8), random(6, 2, 8), extras)
    found = []
    for starts, new in (([0] * len(counts), [2] * len(counts)), ([2] * len(counts), counts)):
        rows, total = RowsPass(cache, range(len(counts)), starts, new, prefix), sum(new)
        found.append(rows.attend(0, random(total, 4, 8), random(total, 2, 8), random(total, 2, 8), extras))
    return torch.cat(found)


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize(
    "extras", [Extras(), Extras(window=5, cap=2.0), Extras(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))]
)
def test_rows_in_parts_are_attended_to_as_whole_ones(
    monkeypatch: pytest.MonkeyPatch, extras: Extras, queries: int
) -> None:
    counts = [9, 4, 12, 2]
    whole = passed("cpu", extras, counts)
    if extras == Extras():
        assert torch.allclose(whole, passed("cpu", None, counts), atol=1e-5)
    monkeypatch.setattr(kv_cache, "SCORES_ELSEWHERE", queries * 4 * (6 + 2 + 12) * 4)
    assert torch.allclose(passed("cpu", extras, counts), whole, atol=1e-5)


@pytest.mark.parametrize("extras", [None, Extras(window=5)])
def test_scores_elsewhere_are_bounded(monkeypatch: pytest.MonkeyPatch, extras: Extras | None) -> None:
    """One long turn alone would have scores of all its tokens by all that they see, and so would its mask."""
    name, most, seen = "attend_with_extras" if extras else "attend_padded", 5000, list[int]()
    before = getattr(kv_cache, name)

    def noted(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, *rest: Any) -> Any:
        assert hidden.shape == (len(q), q.shape[2], keys.shape[2])
        seen.append(q.shape[0] * q.shape[1] * q.shape[2] * (keys.shape[2] + 6) * q.element_size())
        return before(q, keys, values, hidden, *rest)

    monkeypatch.setattr(kv_cache, name, noted)
    monkeypatch.setattr(kv_cache, "SCORES_ELSEWHERE", most)
    made = list[int]()
    hidden = kv_cache._Rows._hidden
    monkeypatch.setattr(
        kv_cache._Rows, "_hidden", lambda self, *place: made.append((found := hidden(self, *place)).numel()) or found
    )
    out = passed("meta", extras, [30, 2, 35, 5])
    assert out.shape == (4 * 2 + 72, 4, 8)
    assert len(seen) > 20
    assert max(seen) <= most
    assert max(made) * 4 * 4 <= most
