"""A worker that samples by itself plays the shards of an adapter, which it loads from the round's home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from db import AdapterRow, AdapterState, open_store
from models.adapters.files import adapter_digest
from tasks.measuring.lineup import load_member
from tasks.round.context import Context
from tasks.round.stage import forget
from tasks.shards.work import works
from tasks.shards.worker import play_part
from tests.adapters_made import make_adapter
from tests.models.vllm_backend.vllm_stub import vllm_stub
from tests.tasks.shards.shared_rounds import opened, ordered, saved_base


def test_the_adapter_of_a_shard_is_loaded_under_the_name_that_the_shard_gives_it(
    settings_folder: Path, tiny_model: Any, tiny_tokenizer: Any
) -> None:
    base = saved_base(settings_folder / "base", tiny_model, tiny_tokenizer)
    with vllm_stub() as stub:
        first = opened(settings_folder / "home", base, stub, policy={"backend": "local"}, dtype="float32")
    second = Context(first.settings, open_store(first.settings.database_url), first.round)
    layers = (first.base.policy.model.config.num_hidden_layers - 1,)
    folder = make_adapter(first.base.policy.model, first.settings.folder / "made", layers=layers)
    digest, mine = adapter_digest(folder), first.base.identity
    trained = AdapterRow(
        id="one", round_id=first.round.id, base=mine.base, base_revision=mine.revision, state=AdapterState.TRAINED,
        config={}, sha256=digest, path="made",
    )  # fmt: skip
    first.store.put([trained])
    name = load_member(first, "refund", "one")
    ground, tasks = ordered(first)
    ground, episodes = replace(ground, adapter_id="one"), [replace(e, adapter=name) for e in tasks[:3]]
    ids = first.engine.engine.ids(ground, episodes)
    keyed = [replace(e, key=i) for i, e in zip(ids, episodes, strict=True)]
    owed = works(ground, keyed, first.policy.identity(), digest, 1)
    first.store.shards(first.round.id).owe("part", [(len(work.episodes), work.as_json()) for work in owed])
    try:
        assert play_part(second, "part").played == len(episodes)
    finally:
        second.close()
        forget(first.round.id)
    assert second.policy.adapters == (name,)
    assert first.store.stored_ids(ids) == set(ids)
