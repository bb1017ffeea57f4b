"""A tiny random model of an architecture on a real vLLM server, beside the trainer's: an adapter is trained with the
server as the sampler, exported, loaded, proven live, and both say what they think of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from environments.contract import Message, Prompt
from models.adapters.files import adapter_digest, export_adapter
from models.adapters.fingerprint import COUNT, Fingerprint, prove
from models.adapters.limits import ServerLimits, check_limits, linear_modules
from models.adapters.loading import fingerprint_on, load_folder
from models.local.base import BaseModel, load_base
from models.local.shapes import has_experts
from models.training.actors import VllmActor
from models.training.grpo import train_adapter
from models.training.records import StepRecord
from models.vllm.policy import VllmPolicy
from settings import load_settings
from tasks.round.policies import check_adapters, open_backend
from tests.integration.vllm_servers import CONTEXT, MAX_RANK, Server, vllm_server
from tests.models.training.test_grpo import SMALL, Source
from tests.shapes_made import tiny_config, tiny_model

# Nats: how far a token's log-probability on the server may lie from the trainer's, both in float32.
TOLERANCE = 0.02
# Without it vLLM's CPU build would compute experts by kernels that it does not have (docker/vllm_cpu).
ATTENTION_ONLY = ("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj")
# Two steps: the second one samples with an adapter that is not zero.
TRAINING = replace(SMALL, steps=2, learning_rate=1e-2, upper_layers=None)


@dataclass(frozen=True)
class Shape:
    """The trainer's `base`, the `policy` on the server as a round opens it, and the server itself."""

    kind: str
    base: BaseModel
    policy: VllmPolicy
    server: Server
    folder: Path


@dataclass(frozen=True)
class Trained:
    """An exported adapter under its `name` on the server, what it must answer, and its training's steps."""

    name: str
    folder: Path
    expected: Fingerprint
    steps: tuple[StepRecord, ...]


def saved_shape(kind: str, folder: Path, tokenizer: Any) -> Path:
    """A folder with the shape and its tokenizer, as trainer and server read it."""
    tiny_model(kind, vocabulary=len(tokenizer), context=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def server_of(kind: str, folder: Path, model: Path) -> AbstractContextManager[Server]:
    """A server with the shape that lies in `model`, in float32; its log goes into `folder`."""
    options = ATTENTION_ONLY if has_experts(tiny_config(kind)) else ()
    return vllm_server(folder, 4, model, "float32", options)


def policy_on(server: Server) -> dict[str, Any]:
    """The settings' part `policy` for a round that samples on the server."""
    return {"backend": "vllm", "url": server.url, "concurrency": 8, "max_lora_rank": MAX_RANK}


@contextmanager
def served_shape(kind: str, folder: Path, tokenizer: Any) -> Iterator[Shape]:
    """The shape on a server of its own, which a round would take: the same base, and adapters reach it."""
    model = saved_shape(kind, folder / "base", tokenizer)
    base = load_base(str(model), "float32", rows=8)
    with server_of(kind, folder, model) as server:
        settings = load_settings(home=folder / "home", base_model=str(model), policy=policy_on(server))
        backend = open_backend(settings, base)
        assert isinstance(backend.policy, VllmPolicy)
        try:
            check_adapters(settings, base, backend)
            yield Shape(kind, base, backend.policy, server, folder)
        finally:
            backend.policy.close()


def trained(shape: Shape) -> Trained:
    """An adapter of the project's own GRPO, every rollout sampled by the server, exported and loaded there."""
    base, steps, shared = shape.base, list[StepRecord](), shape.folder / "shared"
    shared.mkdir()
    probe = base.renderer.start(Prompt("Answer."), [Message("user", "Please cancel order 512.")])
    actor = VllmActor(shape.policy, base.policy.model, shared, probe.ids, "toy@round")
    made = train_adapter(Source(), actor, base.renderer, TRAINING, shape.folder / "out", steps.append)
    folder = export_adapter(made.folder, shape.folder / "made")
    digest = check_limits(folder, ServerLimits("base", "1", MAX_RANK, linear_modules(base.policy.model)), {})
    local = load_folder(base.policy, folder, "toy", "round", digest)
    expected = fingerprint_on(base.policy, probe, local)
    return Trained(load_folder(shape.policy, folder, "toy", "round", digest), folder, expected, tuple(steps))


def furthest(shape: Shape, made: Trained) -> tuple[float, float]:
    """Nats: the furthest that a token of a text lies from the trainer's figure, with the base and with the adapter."""
    ids = made.expected.ids
    base, adapted = (np.asarray(shape.policy.score(ids, COUNT, name)) for name in (None, made.name))
    return (
        float(np.abs(base - np.asarray(made.expected.base)).max()),
        float(np.abs(adapted - np.asarray(made.expected.adapted)).max()),
    )


def moved(shape: Shape, made: Trained) -> float:
    """The project's proof of life on the server: how far the adapter moves the probe there, nats (root mean square).
    Raises `AdapterError` for one that is not live, or another."""
    assert adapter_digest(made.folder) == shape.policy.identity(made.name).adapter
    return prove(shape.policy, made.expected, made.name).moved
