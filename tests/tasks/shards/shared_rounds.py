"""An open round on the target of forty tasks, its turns sampled by a stub of vLLM, on a tiny model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from models.episodes import Episode
from settings import load_settings
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.rollouts import episodes_for
from tasks.round.stage import open_context
from tests.models.vllm_backend.vllm_stub import Stub
from tests.tasks.shards.many_target import NAME, TASKS
from tests.tokenizers_trained import tiny_policy


def saved_base(folder: Path, tiny_model: Any, tiny_tokenizer: Any) -> Path:
    """A folder with the tiny model and its tokenizer."""
    tiny_model[0].model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def opened(home: Path, base: Path, stub: Stub, **given: Any) -> Context:
    """A round of that target; `given` are further settings."""
    stub.context = 4096
    served = tiny_policy(AutoTokenizer.from_pretrained(base))[0]
    stub.scorer = lambda ids, model: served.next_logprobs(ids).tolist()
    policy = {"backend": "vllm", "url": stub.url, "concurrency": 8}
    how = {"target": NAME, "profile": "smoke", "home": home, "base_model": str(base), "policy": policy, **given}
    return open_context(load_settings(**how))


def ordered(context: Context) -> tuple[Playground, list[Episode]]:
    """What the round's rollout would play."""
    return context.ground("diagnosis"), episodes_for(TASKS, 1, context.seed)


def drawn(context: Context, ids: Sequence[str]) -> list[Any]:
    """Everything that was sampled in these trajectories, and how they ended."""
    rows = {row.id: row for row in context.store.trajectories(None, with_blobs=True)}
    return [(rows[i].task_id, rows[i].termination, [int(t) for t in rows[i].token_ids]) for i in ids]
