"""What a gateway serves: one release of a target, whole.

`ServedRelease` is what should be served: its members, and the router that was fitted for exactly these. `Generation` is
what requests get from one swap to the next; it never changes, so that a request that keeps the one it began with sees
one release, whatever is promoted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from errors import StoreError
from models.adapters.failures import of_mlflow
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import without_password

if TYPE_CHECKING:
    from models.router.router import Router

T = TypeVar("T")


@dataclass(frozen=True)
class ServedRelease:
    """A release that is to be served. `number` counts from 1 in its target; `members` by capability; `router` None
    leaves the base to answer, and members to be asked for by name; `live_at` None was never live. With a `problem` it
    cannot be served, whatever the servers say, and what it holds is not looked at."""

    number: int
    members: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    router: Router | None = None
    live_at: datetime | None = None
    problem: str = ""


class Releases(Protocol):
    """What a fleet asks. `live` is the release to serve, None for the base alone; it reads one row, so that it never
    gives parts of two. It raises `StoreError` when the database or the registry does not answer."""

    def live(self) -> ServedRelease | None: ...
    def versions(self, capability: str) -> list[RegisteredAdapter]: ...
    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path: ...


@dataclass(frozen=True, eq=False)
class Generation:
    """What answers requests from one swap to the next: `members` are served names by capability, `since` is the Unix
    time of the swap. Number 0 is the base alone."""

    number: int = 0
    members: Mapping[str, str] = field(default_factory=dict)
    router: Router | None = None
    router_version: str = ""
    live_at: datetime | None = None
    since: float = field(default_factory=time.time)

    @classmethod
    def of(cls, release: ServedRelease | None) -> Generation:
        """What a release is to requests."""
        if release is None:
            return cls()
        names = {capability: adapter.served_name for capability, adapter in sorted(release.members.items())}
        version = release.router.version if release.router else ""
        return cls(release.number, names, release.router, version, release.live_at)


@dataclass(frozen=True)
class Standing:
    """What is served, the number of the release that should be (0: the base alone), and why it is not, or ""."""

    serving: Generation
    wanted: int = 0
    problem: str = ""


def identity(release: ServedRelease | None) -> tuple[int, tuple[str, ...], str]:
    """What tells one release from another: its number, its members' names, and what is wrong with it."""
    if release is None:
        return 0, (), ""
    return release.number, tuple(sorted(a.served_name for a in release.members.values())), release.problem


def title(number: int) -> str:
    """What a release is called in logs."""
    return f"release {number}" if number else "the base alone"


def answered(call: Callable[[], T]) -> T:
    """What the registry says. Raises `StoreError`, without any password, when it does not answer or fails."""
    try:
        return call()
    except Exception as problem:
        if not of_mlflow(problem):
            raise
        said = without_password(str(problem))
        raise StoreError(f"the registry does not answer: {said}; what is served stays as it is") from None
