"""What a home says is to be served: the live release, or a pinned one, whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from db import ReleaseRow, Store
from errors import AdapterError, ConfigurationError, TraceError
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import Registry
from models.policy import PolicyIdentity
from models.router.router import MODES, Router
from models.serving.fleet.releases import ServedRelease, answered
from tasks.releases.lifecycle import live_release, member_adapters, publish, release_numbered, release_router

logger = logging.getLogger("trace")
# How long a release that could not be read is not read again.
RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Routing:
    """The options that say how a release's router decides. `mode` "auto" leaves what the round chose; `fixed` is the
    capability of mode "fixed". Raises `ConfigurationError` for what no router can do."""

    mode: str = "auto"
    fixed: str = ""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise ConfigurationError(f"router mode {self.mode!r} does not exist; choose from auto, {', '.join(MODES)}")
        if self.mode == "fixed" and not self.fixed:
            raise ConfigurationError("mode fixed needs a capability; give --fixed CAPABILITY")
        if self.fixed and self.mode != "fixed":
            raise ConfigurationError(
                f"--fixed {self.fixed!r} is given, and mode {self.mode!r} does not use it; add --mode fixed, or leave "
                "--fixed out"
            )

    def of(self, router: Router | None) -> Router | None:
        """The router that decides where a release has `router`."""
        if self.mode == "off":
            return Router.always()
        if self.mode == "fixed":
            return Router.always(self.fixed)
        return router if router is None or self.mode == "auto" else router.with_mode(self.mode)


@dataclass
class HomeReleases:
    """`Releases` of a target in a home (`models/serving/fleet/releases.py`), for the base model in memory.

    `live` reads the row of one release, the live one or the `pinned` number. Its members and router are read once and
    compared with their digests, and the router has decided once (`ready`) before anything is asked of it.
    """

    store: Store
    registry: Registry
    folder: Path
    target: str
    identity: PolicyIdentity
    ready: Callable[[Router], object]
    routing: Routing = Routing()
    pinned: int = 0
    files: str = ""
    _key: object = field(default=None, init=False)
    _read: ServedRelease | None = field(default=None, init=False)
    _until: float = field(default=0.0, init=False)

    def live(self) -> ServedRelease | None:
        """The release to serve. Raises `StoreError` when the database or the registry does not answer."""
        row = self._row()
        if row is None:
            return None
        key = (row.id, row.live_at)
        if self._read is None or self._key != key or time.monotonic() >= self._until:
            self._read, self._key = self._whole(row), key
            self._until = time.monotonic() + RETRY_SECONDS if self._read.problem else float("inf")
        return self._read

    def versions(self, capability: str) -> list[RegisteredAdapter]:
        """All versions of a capability in the registry."""
        return self.registry.versions(capability)

    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path:
        """An adapter's folder below `destination`, with the registered bytes."""
        return self.registry.download(adapter, destination)

    def heal(self) -> None:
        """Make MLflow say what the database says. What goes wrong is logged: the database decides what is served."""
        try:
            for change in answered(lambda: publish(self.store, self.registry, self.target)):
                logger.warning("MLflow did not say what is live: %s", change)
        except TraceError as problem:
            logger.warning("MLflow could not be brought up to date with what is live: %s", problem)

    def _row(self) -> ReleaseRow | None:
        if self.pinned:
            return release_numbered(self.store, self.target, self.pinned)
        return live_release(self.store, self.target)

    def _whole(self, row: ReleaseRow) -> ServedRelease:
        """A release with all that is in it, or with the reason why it cannot be served."""
        try:
            self._check_base(row)
            members = answered(lambda: member_adapters(self.registry, row))
        except (AdapterError, ConfigurationError) as problem:
            return ServedRelease(row.number, live_at=row.live_at, problem=str(problem))
        try:
            router = self.routing.of(release_router(self.folder, row, self.files))
            if router is not None:
                self.ready(router)
        except TraceError as problem:
            return ServedRelease(row.number, members, live_at=row.live_at, problem=str(problem))
        if router is None:
            logger.warning("release %d of %s has no router: its members are asked for by name", row.number, row.target)
        if self.routing.mode == "fixed" and self.routing.fixed not in members:
            logger.warning("release %d has no member %r: the base answers", row.number, self.routing.fixed)
        return ServedRelease(row.number, members, router, row.live_at)

    def _check_base(self, row: ReleaseRow) -> None:
        mine = self.identity
        if (row.base, row.base_revision) != (mine.base, mine.revision):
            raise ConfigurationError(
                f"release {row.number} of {row.target} stands on {row.base}@{row.base_revision}, this gateway has "
                f"{mine.base}@{mine.revision} in memory; start it again"
            )
