"""What holds adapters for a fleet. A host loads, scores and unloads adapters by name.

A host is a vLLM server, or the model in this process (`EngineHost` in `models/serving/upstreams/local_engine.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from models.vllm.answers import ServerAway, ServerSilent
from models.vllm.server import ServedModel, VllmServer

# The longest wait for a server's list of models, and for an adapter to be loaded, scored or taken away: while one that
# hangs is waited for, no server follows a release. How long a server that was silent is not asked again: each member,
# and whatever is promoted or rolled back meanwhile, would wait for it as long.
LOOK_SECONDS, WORK_SECONDS, SILENT_SECONDS = 20.0, 120.0, 30.0
T = TypeVar("T")


class Host(Protocol):
    """`address` is "" for the model in this process. `names` raises `ServerAway` when no server answers."""

    address: str

    def names(self) -> set[str]: ...
    def load(self, name: str, digest: str, folder: Path) -> None: ...
    def unload(self, name: str) -> None: ...
    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]: ...


class VllmHost:
    """A vLLM server. `server_folder` says where the server sees the fleet's folder, if elsewhere than this process.
    `admit` raises where the server that answers is not the one that is wanted; it is asked of one that was away (`lost`
    is told its address), that lists other bases than at the last look, or is not `admitted` from the beginning."""

    def __init__(
        self,
        server: VllmServer,
        server_folder: str = "",
        admit: Callable[[VllmServer], object] = bool,
        admitted: bool = True,
        lost: Callable[[str], object] = bool,
    ) -> None:
        self.address, self.server_folder = server.url, server_folder
        self._admit, self._admitted, self._lost = admit, admitted, lost
        self._bases: set[ServedModel] | None = None
        self._looked, self._worked = server.limited(LOOK_SECONDS), server.limited(WORK_SECONDS)
        self._silent_until = float("-inf")

    def names(self) -> set[str]:
        try:
            return {name for name, model in self._asked(self._models).items() if model.parent}
        except ServerAway:  # who answers there next may be another
            self._admitted = False
            self._lost(self.address)
            raise

    def _models(self) -> dict[str, ServedModel]:
        found = self._looked.models()
        bases = {model for model in found.values() if not model.parent}
        if not self._admitted or bases != (self._bases or bases):  # the weights' revision is the name of one
            self._admitted = False
            self._admit(self._looked)
            self._admitted = True
        self._bases = bases
        return found

    def load(self, name: str, digest: str, folder: Path) -> None:
        place = f"{self.server_folder.rstrip('/')}/{folder.name}" if self.server_folder else str(folder.resolve())
        self._asked(lambda: self._worked.load(name, place))

    def unload(self, name: str) -> None:
        self._asked(lambda: self._worked.unload(name))

    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]:
        return self._asked(lambda: self._worked.score(ids, count, adapter))

    def _asked(self, call: Callable[[], T]) -> T:
        if time.monotonic() < self._silent_until:
            raise ServerSilent(f"{self.address} was silent when it was asked last; look at its log", transient=True)
        try:
            return call()
        except ServerSilent:
            self._silent_until = time.monotonic() + SILENT_SECONDS
            raise
