"""What tests of a vLLM server share: the local model beside it, a registry, and a fleet on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.adapters.files import AdapterRecord, RegisteredAdapter
from models.adapters.fingerprint import TAG, take_fingerprint
from models.adapters.registry import Registry
from models.serving.fleet.fleet import Fleet
from models.serving.fleet.lifecycle import ServedAdapter
from models.serving.fleet.releases import Generation, ServedRelease
from models.vllm.server import VllmServer


@dataclass
class World:
    """Everything that the tests share: the local model, the registry, a fleet on the server."""

    local: Any
    renderer: Any
    text: list[int]
    server: VllmServer
    registry: Registry
    run: str
    fleet: Fleet = field(init=False)
    wanted: ServedRelease | None = None

    def live(self) -> ServedRelease | None:
        """What the fleet is to serve."""
        return self.wanted

    def versions(self, capability: str) -> list[RegisteredAdapter]:
        return self.registry.versions(capability)

    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path:
        return self.registry.download(adapter, destination)

    def release(self, *adapters: RegisteredAdapter, follow: bool = False) -> list[str]:
        """Another release is live; the next reconciliation, or what a gateway does in between (`follow`)."""
        number = self.wanted.number + 1 if self.wanted else 1
        self.wanted = ServedRelease(number, {a.capability: a for a in adapters})
        return self.fleet.follow() if follow else self.fleet.reconcile()

    def take(self, capability: str) -> tuple[Generation, ServedAdapter | None]:
        """What a request does."""
        generation = self.fleet.enter()
        return generation, self.fleet.acquire(generation, capability)

    def answers(self, capability: str) -> ServedAdapter | None:
        """Who answers a request now."""
        generation, served = self.take(capability)
        self.fleet.leave(generation, served.name if served else "")
        return served

    def register(self, capability: str, folder: Path, like: Path | None = None, **tags: str) -> RegisteredAdapter:
        """Register `folder` with the fingerprint of `like`, which is itself if not given."""
        self.local.load_adapter("taken", "taken", like or folder)
        try:
            taken = take_fingerprint(self.local, self.text, "taken")
        finally:
            self.local.unload_adapter("taken")
        base = self.local.identity()
        record = AdapterRecord(capability, base.base, base.revision, "round", {}, {TAG: taken.text()} | tags)
        return self.registry.register(record, folder, self.run)
