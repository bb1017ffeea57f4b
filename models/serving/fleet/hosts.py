"""What holds adapters for a fleet. A host loads, scores and unloads adapters by name.

A host is a vLLM server, or the model in this process (`EngineHost` in `models/serving/upstreams/local_engine.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from models.vllm.server import VllmServer


class Host(Protocol):
    """`address` is "" for the model in this process. `names` raises `ServerAway` when no server answers."""

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
