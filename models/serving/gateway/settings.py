"""The gateway's settings: names, limits, keys, and what happens when an adapter is missing."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from environments.contract import Prompt
from errors import ConfigurationError

KEYS_VARIABLE = "TRACE_GATEWAY_KEYS"
SHORTEST_KEY = 16
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MISSING = ("base", "503")


@dataclass(frozen=True)
class Keys:
    """API keys, kept as hashes: neither a log nor a traceback can show one. None means that none is asked for."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Raises `ConfigurationError` for a key that is too short to be one."""
        given = [key.strip() for key in keys if key.strip()]
        if any(len(key) < SHORTEST_KEY for key in given):
            raise ConfigurationError(f"a gateway key has fewer than {SHORTEST_KEY} characters; take a random one")
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in given))

    @classmethod
    def read(cls, file: Path | None, given: SecretStr) -> Keys:
        """Keys of `file` (one a line, # begins a comment) and those `given` by the setting `gateway_keys` (commas
        between). Raises `ConfigurationError`, which never shows a key."""
        lines: list[str] = given.get_secret_value().split(",")
        if file is not None:
            try:
                lines += [line.partition("#")[0] for line in file.read_text("utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as problem:
                raise ConfigurationError(
                    f"key file {file} cannot be read ({type(problem).__name__}); name another"
                ) from None
        keys = cls.of(lines)
        if file is not None and not keys.digests:
            raise ConfigurationError(f"key file {file} holds no key; write one a line")
        return keys

    def owner(self, authorization: str) -> str | None:
        """Who sent the header `Authorization: Bearer KEY`: a name for the key that does not tell it, "" when no keys
        are asked for, None when the key is wrong. Takes equally long for every wrong key."""
        if not self.digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        right = [hmac.compare_digest(given, digest) for digest in self.digests]
        return given.hex()[:8] if any(right) and scheme.lower() == "bearer" else None


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
    keys: Keys = Keys()

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
