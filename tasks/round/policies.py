"""Which policy samples: the model in this process or vLLM servers. Decided here, once; the rest asks the protocol.

The servers are checked before a round starts, so torch is imported only when a policy is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from errors import ConfigurationError
from models.policy import PolicyIdentity, TrainablePolicy
from settings import Settings, writable_folder
from settings_parts import shown_variable
from tasks.unattended.alive import check_nobody_trains

if TYPE_CHECKING:
    from models.local.base import BaseModel
    from models.training.actors import Actor
    from models.vllm.policy import VllmPolicy
    from models.vllm.server import VllmServer

# Longest wait for what a server says of itself, before a round.
CHECK_SECONDS = 30.0


@dataclass(frozen=True)
class Backend:
    """One way to sample, opened. `actor` makes who samples while an adapter is trained: from the ids of a probe, in
    which servers are asked whether they hold a step's adapter, and what the names of those adapters begin with."""

    policy: TrainablePolicy
    actor: Callable[[Sequence[int], str], Actor]


def open_servers(settings: Settings, seconds: float | None = None) -> list[VllmServer]:
    """The vLLM servers that the settings name; nothing is asked of them yet. The caller closes them.

    Raises `ConfigurationError` for no address, or a key's variable that is not set.
    """
    from models.vllm.server import VllmServer

    wanted = settings.policy
    key = os.environ.get(wanted.api_key_env, "") if wanted.api_key_env else ""
    if wanted.api_key_env and not key:
        raise ConfigurationError(
            f"policy.api_key_env names the variable {shown_variable(wanted.api_key_env)}, which is not set; set it to "
            "the servers' key"
        )
    if not wanted.urls:
        raise ConfigurationError(f"policy.url = {wanted.url!r} names no server; give an address")
    limit = seconds or wanted.seconds
    return [VllmServer(url, wanted.model, key, wanted.concurrency, limit) for url in wanted.urls]


def check_policy(settings: Settings) -> None:
    """Before any work: the servers are there and awake, have one and the same base, and sample as needed. Nothing for
    the local backend. Raises `ServersBusy` where they sleep for a training of another process."""
    if settings.policy.backend == "vllm":
        from models.vllm.equality import check_base, probe
        from models.vllm.server import WAITS

        writable_folder(settings.lora_folder)
        if settings.devices.sleep:
            check_nobody_trains(settings)
        scores = {}
        # That it is there is told soon; the first text that a server scores may take what any turn may: it warms up.
        for server in open_servers(settings):
            with closing(server), closing(server.limited(CHECK_SECONDS)) as quick:
                quick.models(WAITS[:2])
                if settings.devices.sleep:
                    server.rouse()
                else:
                    check_awake(quick, settings)
                server.check()
                scores[server.url] = probe(server)
        check_base(scores)


def check_awake(server: VllmServer, settings: Settings) -> None:
    """A server that sleeps answers nothing; this is for callers that do not wake it. Raises `ServersBusy` where it
    sleeps for a training, and `ConfigurationError` where it was left asleep."""
    if server.asleep():
        check_nobody_trains(settings)
        raise ConfigurationError(
            f"{server.url} is asleep: a training of another home needs its memory, or one was killed; if nobody trains "
            f"there, wake it with 'curl -X POST {server.url}/wake_up', as a new round with devices.sleep does"
        )


def open_remote(settings: Settings, identity: PolicyIdentity, stop_ids: frozenset[int]) -> VllmPolicy:
    """The policy on the servers that the settings name; `identity` is the base's there."""
    from models.vllm.policy import VllmPolicy

    return VllmPolicy(
        open_servers(settings),
        identity,
        stop_ids,
        settings.policy.concurrency,
        settings.lora_folder,
        settings.policy.server_folder,
        settings.policy.stall_seconds,
    )


def open_backend(settings: Settings, base: BaseModel) -> Backend:
    """What samples in this round. The servers' identity says so: their draws are not those of the local model.

    Raises `ConfigurationError` for a server that holds another base than `base`, before anything is sampled, and
    `ServersBusy` where they sleep for a training of another process.
    """
    from models.local.base import weights_of
    from models.training.actors import LocalActor, VllmActor
    from models.vllm.same_base import prove_same_base

    if settings.policy.backend == "local":
        return Backend(base.policy, lambda probe, name: LocalActor(base.policy))
    mine, lora_folder = base.identity, settings.lora_folder
    identity = PolicyIdentity(mine.base, mine.revision, f"vllm:{settings.policy.model}", "", mine.renderer)
    for server in open_servers(settings):
        if settings.devices.sleep:  # a killed round's servers sleep until they are told otherwise
            if server.asleep():  # in a round, whose own training may have a worker play, they are awake
                check_nobody_trains(settings)
            server.rouse()
        server.check_weights(weights_of(base, settings.cache))
        server.close()
    policy = open_remote(settings, identity, base.renderer.stop_ids)
    try:
        prove_same_base(policy, base)
    except BaseException:
        policy.close()
        raise

    def actor(probe: Sequence[int], name: str) -> Actor:
        folder = writable_folder(lora_folder)
        return VllmActor(policy, base.policy.model, folder, probe, name, settings.devices.sleep)

    return Backend(policy, actor)


def check_adapters(settings: Settings, base: BaseModel, backend: Backend) -> None:
    """Before a round's first episode: the servers take adapters as they are trained. Nothing for the local backend."""
    from models.training.reach import prove_adapters_reach
    from models.vllm.policy import VllmPolicy

    if isinstance(backend.policy, VllmPolicy):
        prove_adapters_reach(backend.policy, base, writable_folder(settings.lora_folder), settings.train.rank)
