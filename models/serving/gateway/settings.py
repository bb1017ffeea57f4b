"""The gateway's settings: names, limits, and what happens when an adapter is missing."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from environments.contract import Prompt
from errors import ConfigurationError
from models.serving.gateway.keys import Keys

KEYS_VARIABLE = "TRACE_GATEWAY_KEYS"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MISSING = ("base", "503")


@dataclass(frozen=True)
class Preset:
    """The prompt that stands before requests without instructions: the one that the adapters were trained behind.
    `name` is the target's, for headers and the status page."""

    name: str
    prompt: Prompt


@dataclass(frozen=True)
class GatewaySettings:
    """`routed` is the model name that asks for routing, `base` the one that the base is served under; `missing` says
    what happens when the adapter that a conversation needs is not live: the base answers, or 503. `deadline` in
    seconds, for the whole answer; `most_bytes` of a body; `most_requests` at once. `sample` is the share of
    conversations that is stored. `pinned` is the number of a release that is served whichever is live, 0 for none."""

    target: str = ""
    pinned: int = 0
    routed: str = "trace"
    base: str = "base"
    missing: str = "base"
    deadline: float = 120.0
    most_bytes: int = 4 << 20
    most_requests: int = 64
    sample: float = 1.0
    blend: float = 0.0
    keys: Keys = field(default_factory=Keys)

    def __post_init__(self) -> None:
        if self.missing not in MISSING:
            raise ConfigurationError(f"missing = {self.missing!r}; choose from {', '.join(MISSING)}")
        if self.deadline <= 0 or self.most_requests < 1 or self.most_bytes < 1:
            raise ConfigurationError("deadline, most_requests and most_bytes must be above 0")
        if not 0 <= self.sample <= 1 or not 0 <= self.blend < 1:
            raise ConfigurationError("sample lies in [0, 1] and blend in [0, 1)")


def check_host(host: str, keys: Keys) -> None:
    """Raises `ConfigurationError` for an address that others reach while no key is asked for."""
    if host not in LOOPBACK and not keys.digests:
        raise ConfigurationError(
            f"the gateway would listen on {host} without keys; set {KEYS_VARIABLE} or --keys FILE, or use 127.0.0.1"
        )


def check_port(host: str, port: int, name: str, option: str) -> None:
    """Raises `ConfigurationError` for a port that `name` cannot listen on, as when it is taken; `option` moves it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as problem:
        raise ConfigurationError(
            f"port {port} of {name} cannot be listened on ({problem.strerror}): stop what has it, or give another with "
            f"{option}"
        ) from None
