"""The vLLM servers behind a gateway: it begins with those that answer; the others join once they have its base."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from dataclasses import dataclass

from errors import ConfigurationError, ProviderError
from models.serving.fleet.hosts import LOOK_SECONDS, WORK_SECONDS, Host, VllmHost
from models.serving.upstreams.pool import Pool, Servers
from models.vllm.server import VllmServer
from settings import Settings
from tasks.round.policies import open_servers

logger = logging.getLogger("trace")


@dataclass(frozen=True)
class Replicas:
    """`pool` is what requests go through, `hosts` hold the adapters, `context` is the shortest of the servers' in
    tokens."""

    pool: Pool
    hosts: list[Host]
    context: int


def open_replicas(settings: Settings, weights: str) -> Replicas:
    """The servers that the settings name, which must have the base with these `weights` (`weights_of`) and sample as
    needed. One that is away, hangs or is broken is asked for nothing until it was seen to.

    Raises `ConfigurationError` for a server that is another, and when none answers what was seen of the first
    (`ProviderError`, transient).
    """
    servers, policy = open_servers(settings), settings.policy
    key = os.environ.get(policy.api_key_env, "") if policy.api_key_env else ""
    pool, contexts, away = Pool(Servers(policy.urls, key)), dict[str, int](), dict[str, ProviderError]()
    for server in servers:
        try:
            contexts[server.url] = _checked(server, weights)
        except ProviderError as problem:
            if not problem.transient:
                raise
            away[server.url] = problem
    for url, reason in away.items():
        if not contexts:
            raise reason
        pool.held.add(url)
        logger.warning("%s; the gateway begins without it, and uses it once it answers with the same base", reason)
    context = min(contexts.values())

    def admit(server: VllmServer) -> None:
        """Let a server answer that is there (again), or keep it from it where it is another now."""
        try:
            if (found := server.check()) < context:
                raise ConfigurationError(
                    f"{server.url} has a context of {found} tokens, and the gateway began with {context}; start the "
                    f"server with --max-model-len {context}, or the gateway again"
                )
            server.check_weights(weights)
        except Exception as problem:
            if isinstance(problem, ProviderError) and problem.transient:  # not yet, or not again
                pool.lose(server.url)
            else:
                pool.held.add(server.url)
            raise
        pool.held.discard(server.url)
        pool.unproven.discard(server.url)

    quick = {server.url: server.limited(LOOK_SECONDS) for server in servers}

    def prove(address: str) -> None:
        """What a request waits for, so one that is still away is asked once."""
        quick[address].models()
        admit(quick[address])

    pool.prove, folder = prove, policy.server_folder
    hosts = [VllmHost(server, folder, admit, server.url not in away, pool.lose) for server in servers]
    return Replicas(pool, [*hosts], context)


def _checked(server: VllmServer, weights: str) -> int:
    """A server's context in tokens, once it has the base with these weights. One that hangs is not waited for as long
    as for a turn; the first tokens that it samples may take longer than its list of models does."""
    with closing(server.limited(LOOK_SECONDS)) as looked, closing(server.limited(WORK_SECONDS)) as worked:
        looked.check_weights(weights)
        return worked.check()
