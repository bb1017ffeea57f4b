"""A fleet on two stub servers with adapters of a tiny model, and the releases that a test makes live."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import AdapterError, StoreError
from models.adapters.files import RegisteredAdapter, adapter_digest
from models.adapters.fingerprint import TAG, Fingerprint
from models.adapters.limits import ServerLimits, linear_modules
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.hosts import VllmHost
from models.serving.fleet.lifecycle import AdapterState, ServedAdapter
from models.serving.fleet.releases import Generation, ServedRelease
from models.vllm.server import VllmServer
from tests.adapters_made import make_adapter
from tests.models.vllm_backend.vllm_stub import Stub, logprob, vllm_stub

IDS = tuple(range(1, 20))
MOVE = 0.3


def proof(move: float = MOVE, base: float = 0.0) -> Fingerprint:
    """What the stub says of IDS under a move."""
    return Fingerprint(
        IDS, tuple(logprob(t, 0.0) + base for t in IDS[3:]), tuple(logprob(t, move) + base for t in IDS[3:])
    )


@dataclass
class Shelf:
    """Stands for a home: the release that is live, folders copied on download."""

    folders: dict[str, Path] = field(default_factory=dict)
    wanted: ServedRelease | None = None
    known: list[RegisteredAdapter] = field(default_factory=list)
    away: bool = False

    def add(self, folder: Path, capability: str, version: int, **tags: str) -> RegisteredAdapter:
        digest = adapter_digest(folder)
        own = {"base": "tiny", "base_revision": "r1", TAG: proof().text()} | tags
        adapter = RegisteredAdapter(f"trace-t-{capability}", str(version), capability, digest, "m", "r", own)
        self.folders[adapter.served_name] = folder
        self.known.append(adapter)
        return adapter

    def live(self) -> ServedRelease | None:
        if self.away:
            raise StoreError("the database is away; start it")
        return self.wanted

    def versions(self, capability: str) -> list[RegisteredAdapter]:
        return [a for a in self.known if a.capability == capability]

    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path:
        folder = destination / adapter.served_name
        if not folder.exists():
            shutil.copytree(self.folders[adapter.served_name], folder)
        if adapter_digest(folder) != adapter.sha256:
            raise AdapterError(f"{folder} was changed; fetch it again")
        return folder


@dataclass
class Stage:
    """A fleet on two stubs with two versions of `pay` on the shelf."""

    stubs: list[Stub]
    shelf: Shelf
    fleet: Fleet
    one: RegisteredAdapter
    two: RegisteredAdapter
    folder: Path

    def live(self, number: int, *adapters: RegisteredAdapter, router: Any = None) -> list[str]:
        """Another release is live; the next reconciliation."""
        self.shelf.wanted = ServedRelease(number, {a.capability: a for a in adapters}, router) if number else None
        return self.fleet.reconcile()

    def take(self, capability: str = "pay") -> tuple[Generation, ServedAdapter | None]:
        """What a request does."""
        generation = self.fleet.enter()
        return generation, self.fleet.acquire(generation, capability)

    def answers(self, capability: str = "pay") -> str:
        """The name that answers a request now, "" for the base."""
        generation, served = self.take(capability)
        self.fleet.leave(generation, served.name if served else "")
        return served.name if served else ""

    def states(self) -> dict[str, AdapterState]:
        return {a.name: a.state for a in self.fleet.adapters()}


@contextmanager
def staged(model: Any, folder: Path) -> Iterator[Stage]:
    """A fleet of `model`'s adapters in `folder`."""
    shelf = Shelf()
    one, two = (shelf.add(make_adapter(model, folder / f"made{n}", seed=n, layers=(1, 2)), "pay", n) for n in (1, 2))
    with vllm_stub() as first, vllm_stub() as second:
        for stub in (first, second):
            stub.moves = {one.served_name: MOVE, two.served_name: MOVE}
        hosts = [VllmHost(VllmServer(s.url, "base")) for s in (first, second)]
        limits = ServerLimits("tiny", "r1", 16, linear_modules(model))
        fleet = Fleet(shelf, hosts, folder / "served", limits, drain_seconds=5)
        (folder / "served").mkdir()
        yield Stage([first, second], shelf, fleet, one, two, folder)
