"""Which policy samples: the model in this process or vLLM servers, and how a round's adapters reach it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from environments.contract import Message
from errors import AdapterError, ConfigurationError
from models.adapters.deltas import folder_deltas
from models.adapters.files import adapter_digest, export_adapter
from models.adapters.fingerprint import Fingerprint, take_fingerprint
from models.local.base import BaseModel
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity, Request, Sampling
from models.training.actors import Actor, VllmActor
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from settings import Settings, writable_folder

PROBE = "Please cancel order 314."
PROBE_TOKENS = 12


def open_servers(settings: Settings, seconds: float | None = None) -> list[VllmServer]:
    """The vLLM servers that the settings name; nothing is asked of them yet. The caller closes them.

    Raises `ConfigurationError` for no address, or a key's variable that is not set.
    """
    wanted = settings.policy
    key = os.environ.get(wanted.api_key_env, "") if wanted.api_key_env else ""
    if wanted.api_key_env and not key:
        raise ConfigurationError(
            f"policy.api_key_env names {wanted.api_key_env}, which is not set; set it to the servers' key"
        )
    if not wanted.urls:
        raise ConfigurationError(f"policy.url = {wanted.url!r} names no server; give an address")
    limit = seconds or wanted.seconds
    return [VllmServer(url, wanted.model, key, wanted.concurrency, limit) for url in wanted.urls]


def check_policy(settings: Settings) -> None:
    """Before any work: the servers are there, have the base, and sample as needed. Nothing for the local backend."""
    if settings.policy.backend == "vllm":
        writable_folder(settings.lora_folder)
        for server in open_servers(settings, seconds=30.0):
            server.check()
            server.close()


def open_policy(settings: Settings, base: BaseModel) -> LocalPolicy | VllmPolicy:
    """What samples in this round. The servers' identity says so: their draws are not those of the local model."""
    if settings.policy.backend == "local":
        return base.policy
    mine = base.identity
    identity = PolicyIdentity(mine.base, mine.revision, f"vllm:{settings.policy.model}", "", mine.renderer)
    folder = (settings.lora_folder, settings.policy.server_folder) if settings.policy.server_folder else None
    return VllmPolicy(open_servers(settings), identity, base.renderer.stop_ids, settings.policy.concurrency, folder)


def load_adapter(
    policy: LocalPolicy | VllmPolicy, settings: Settings, folder: Path, capability: str, where: str
) -> tuple[str, str]:
    """Make a trained folder usable: (name to sample with, digest). `where` tells its name on servers from those of
    other rounds."""
    if isinstance(policy, LocalPolicy):
        digest, deltas = folder_deltas(folder)
        if capability not in policy.adapters:
            policy.load_adapter(capability, digest, deltas)
        return capability, digest
    digest = adapter_digest(folder)
    name = f"{capability}@{where}-{digest[:8]}"
    if name not in policy.adapters:
        shared = settings.lora_folder / name
        if not shared.exists():
            part = export_adapter(folder, shared.with_name(f".{name}.{os.getpid()}"))
            part.rename(shared)
        if adapter_digest(shared) != digest:
            raise AdapterError(f"{shared} is not what was trained; remove it and start again")
        policy.load_adapter(name, digest, shared)
    return name, digest


def training_actor(
    policy: LocalPolicy | VllmPolicy, base: BaseModel, settings: Settings, probe: Sequence[int], name: str
) -> LocalPolicy | Actor:
    """Who samples while an adapter is trained."""
    if isinstance(policy, LocalPolicy):
        return policy
    return VllmActor(policy, base.policy.model, writable_folder(settings.lora_folder), probe, name)


def probe_ids(base: BaseModel, environment: object) -> tuple[list[int], int]:
    """Ids of the probe in an environment's own prompt, and how many of them other prompts share."""
    conversation = base.renderer.start(
        getattr(environment, "instructions", ""),
        getattr(environment, "tools", ()),
        getattr(environment, "examples", ()),
        [Message("user", PROBE)],
    )
    return list(conversation.ids), conversation.shared


def fingerprint_of(policy: LocalPolicy | VllmPolicy, base: BaseModel, environment: object, adapter: str) -> Fingerprint:
    """What a server that holds the adapter must answer: taken on the probe and the adapter's own greedy answer to it.

    Raises `AdapterError` when the adapter changes nothing.
    """
    ids, shared = probe_ids(base, environment)
    (answer,) = policy.generate([Request("fingerprint", ids, Sampling(0.0, PROBE_TOKENS), adapter, shared)])
    return take_fingerprint(policy, [*ids, *answer.ids], adapter)
