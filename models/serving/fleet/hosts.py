"""What holds adapters for a fleet: a vLLM server, or the model in this process. Both load, score and unload by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from models.adapters.deltas import folder_deltas
from models.local.policy import LocalPolicy
from models.vllm.server import VllmServer


class Host(Protocol):
    """`address` is "" for the model in this process. `names` raises `ServerAway` when nobody answers."""

    address: str

    def names(self) -> set[str]: ...
    def load(self, name: str, digest: str, folder: Path) -> None: ...
    def unload(self, name: str) -> None: ...
    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]: ...


class VllmHost:
    """A vLLM server. `server_folder` says where the server sees the fleet's folder, if elsewhere than this process."""

    def __init__(self, server: VllmServer, server_folder: str = "") -> None:
        self.server, self.address, self.server_folder = server, server.url, server_folder

    def names(self) -> set[str]:
        return {name for name, model in self.server.models().items() if model.parent}

    def load(self, name: str, digest: str, folder: Path) -> None:
        place = f"{self.server_folder.rstrip('/')}/{folder.name}" if self.server_folder else str(folder.resolve())
        self.server.load(name, place)

    def unload(self, name: str) -> None:
        self.server.unload(name)

    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]:
        return self.server.score(ids, count, adapter)


class LocalHost:
    """The model in this process. Whoever samples from `policy` holds `lock` while turns are in flight."""

    address = ""

    def __init__(self, policy: LocalPolicy, lock: threading.RLock | None = None) -> None:
        self.policy, self.lock = policy, lock or threading.RLock()

    def names(self) -> set[str]:
        with self.lock:
            return set(self.policy.adapters)

    def load(self, name: str, digest: str, folder: Path) -> None:
        found, deltas = folder_deltas(folder)
        assert found == digest  # check_limits gave it, from the same folder
        with self.lock:
            self.policy.load_adapter(name, digest, deltas)

    def unload(self, name: str) -> None:
        with self.lock:
            if name in self.policy.adapters:
                self.policy.unload_adapter(name)

    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]:
        with self.lock:
            return self.policy.score(ids, count, adapter)
