"""The registry's champions on all servers: load, prove, route, drain, unload (contract:
`models/serving/fleet/lifecycle.py`).

The order is what keeps promotions free of failures: a new version takes requests only after it was proven on a server,
the old one stays loaded until its last request is answered. A version that cannot be loaded or proven is refused with
its reason, and the version before it goes on answering while it is live. Servers that forgot (restart) get everything
again; names that the registry knows but no longer wants are taken from them; names unknown to it are left alone.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

from errors import AdapterError, ProviderError, StoreError, TraceError
from models.adapters.files import RegisteredAdapter
from models.adapters.fingerprint import prove, read_fingerprint
from models.adapters.limits import ServerLimits, check_limits
from models.serving.fleet.hosts import Host
from models.serving.fleet.lifecycle import AdapterState, ServedAdapter
from models.vllm.server import ModelMissing

logger = logging.getLogger("trace.models")
T = TypeVar("T")
_SERVED_NAME = re.compile(r"(?P<capability>.+)@v(?P<version>\d+)-(?P<sha8>[0-9a-f]{8})")


class Champions(Protocol):
    """What a fleet asks the registry (`models/adapters/registry.py`)."""

    def champions(self) -> dict[str, RegisteredAdapter]: ...
    def versions(self, capability: str) -> list[RegisteredAdapter]: ...
    def download(self, adapter: RegisteredAdapter, destination: Path) -> Path: ...


@dataclass
class _Entry:
    """A version that is or was served. `proven` are the hosts that it was proven live on at the last look."""

    adapter: RegisteredAdapter
    state: AdapterState = AdapterState.UNREACHABLE
    reason: str = ""
    live_since: float | None = None
    in_flight: int = 0
    proven: list[Host] = field(default_factory=list)

    def served(self) -> ServedAdapter:
        a = self.adapter
        addresses = tuple(h.address for h in self.proven if h.address)
        return ServedAdapter(
            a.served_name,
            a.capability,
            a.version,
            a.sha256,
            self.state,
            self.live_since,
            self.reason,
            addresses,
            self.in_flight,
        )


class Fleet:
    """`AdapterFleet` on `hosts`. `folder` is where adapters are put for the servers to read; it must stay.

    `drain_seconds` is the longest wait for requests in flight on a version that is replaced. Where several gateways
    share the servers give `linger_seconds` above their reconciling interval: a replaced version then stays loaded that
    long, for those who have not heard yet.
    """

    def __init__(
        self,
        registry: Champions,
        hosts: Sequence[Host],
        folder: Path,
        limits: ServerLimits,
        drain_seconds: float = 60.0,
        linger_seconds: float = 0.0,
    ) -> None:
        self.registry, self.hosts, self.folder, self.limits = registry, tuple(hosts), folder, limits
        self.drain_seconds, self.linger_seconds = drain_seconds, linger_seconds
        self._one = threading.Lock()  # one reconciliation at a time
        self._changed = threading.Condition()  # guards all that follows
        self._entries: dict[str, _Entry] = {}
        self._routes: dict[str, str] = {}
        self._up: list[Host] = []
        self._retired: dict[str, float] = {}  # name -> when it stopped being routed to

    # --- for requests -----------------------------------------------------------------------------------------

    def adapters(self) -> list[ServedAdapter]:
        """All versions that are served, drained or refused, by capability and version."""
        with self._changed:
            found = [e.served() for e in self._entries.values()]
        return sorted(found, key=lambda a: (a.capability, int(a.version)))

    def replicas(self) -> list[str]:
        """Addresses of the servers that answered at the last look (empty for the local model)."""
        with self._changed:
            return [h.address for h in self._up if h.address]

    def acquire(self, capability: str) -> ServedAdapter | None:
        """The live adapter of a capability, counted as in flight until `release`; None when there is none."""
        with self._changed:
            entry = self._entries.get(self._routes.get(capability, ""))
            if entry is None or entry.state is not AdapterState.LIVE:
                return None
            entry.in_flight += 1
            return entry.served()

    def release(self, name: str) -> None:
        """The request that acquired `name` is answered."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is not None and entry.in_flight:
                entry.in_flight -= 1
                self._changed.notify_all()

    def report(self, name: str, replica: str = "") -> None:
        """A server did not know `name`: it is not handed out there again before it was proven anew."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return
            entry.proven = [h for h in entry.proven if h.address != replica]
            if not entry.proven and entry.state is AdapterState.LIVE:
                entry.state, entry.live_since = AdapterState.UNREACHABLE, None
                entry.reason = f"{replica or 'the model'} no longer knew it; waiting for the next reconciliation"
        logger.warning("adapter %s is missing on %s", name, replica or "the local model")

    # --- reconciling ------------------------------------------------------------------------------------------

    def reconcile(self) -> list[str]:
        """Make the hosts serve the registry's champions; what changed, one line each.

        Raises what the registry raises (`StoreError` when it does not answer): then nothing was changed.
        """
        with self._one:
            wanted = {a.served_name: a for a in self._champions().values()}
            changes: list[str] = []
            loaded = self._look(changes)
            for name, adapter in chain(wanted.items(), self._stand_ins(wanted)):
                self._serve(name, adapter, loaded, changes)
            gone = self._retire(wanted, loaded, changes)
            self._unload(gone, loaded, changes)
            return changes

    def _champions(self) -> dict[str, RegisteredAdapter]:
        return _asked(self.registry.champions)

    def _stand_ins(self, wanted: dict[str, RegisteredAdapter]) -> Iterator[tuple[str, RegisteredAdapter]]:
        """Versions that answer in the place of a champion that is not live; to be asked after serving those."""
        with self._changed:
            lacking = {a.capability for n, a in wanted.items() if self._entries[n].state is not AdapterState.LIVE}
            names = [n for c, n in self._routes.items() if c in lacking and n not in wanted]
            found = [(n, self._entries[n].adapter) for n in names]
        yield from found

    def _fetch(self, adapter: RegisteredAdapter) -> Path:
        """The adapter's folder with the registered bytes; one that was changed is fetched again (servers read it again
        when their memory is full)."""
        try:
            return _asked(lambda: self.registry.download(adapter, self.folder))
        except AdapterError as problem:
            folder = self.folder / adapter.served_name
            if not folder.is_dir():
                raise
            logger.warning("%s; fetching it again", problem)
            shutil.rmtree(folder)
            return _asked(lambda: self.registry.download(adapter, self.folder))

    def _look(self, changes: list[str]) -> dict[Host, set[str]]:
        """What each host that answers has loaded."""
        loaded: dict[Host, set[str]] = {}
        for host in self.hosts:
            try:
                loaded[host] = host.names()
            except TraceError as problem:
                logger.warning("%s", problem)
        with self._changed:
            for host in self.hosts:
                if (host in loaded) != (host in self._up):
                    changes.append(f"{host.address or 'the local model'} {'answers' if host in loaded else 'is away'}")
            self._up = list(loaded)
        return loaded

    def _serve(self, name: str, adapter: RegisteredAdapter, loaded: dict[Host, set[str]], changes: list[str]) -> None:
        """Load and prove a wanted version on every host that answers, then route to it."""
        with self._changed:
            entry = self._entries.setdefault(name, _Entry(adapter))
            before = (entry.state, entry.reason)
        proven: list[Host] = []
        reasons: list[str] = []
        refused = False
        try:
            folder = self._fetch(adapter)
            check_limits(folder, self.limits, adapter.tags)
            expected = read_fingerprint(adapter.tags, name)
            for host, names in loaded.items():
                try:
                    if name not in names:
                        host.load(name, adapter.sha256, folder)
                        names.add(name)
                        changes.append(f"{name} loaded on {host.address or 'the local model'}")
                    prove(host, expected, name)
                    proven.append(host)
                except (AdapterError, ModelMissing, ProviderError) as problem:
                    reasons.append(str(problem))
                    refused = refused or isinstance(problem, AdapterError)
        except StoreError as problem:
            if before[0] is AdapterState.LIVE:
                logger.warning("%s; %s stays as it is", problem, name)
                return
            reasons = [str(problem)]
        except (AdapterError, OSError) as problem:
            reasons, refused = [str(problem)], True
        with self._changed:
            entry.proven = proven
            if proven:
                entry.state, entry.live_since = AdapterState.LIVE, entry.live_since or time.time()
            else:
                entry.state = AdapterState.REFUSED if refused else AdapterState.UNREACHABLE
                entry.live_since = None
            entry.reason = "; ".join(reasons)
            if not proven and not reasons:
                entry.reason = "no server answers"
            if proven:
                self._routes[adapter.capability] = name
                self._retired.pop(name, None)
            after = (entry.state, entry.reason)
        if before != after:
            changes.append(f"{name} is {after[0]}{': ' if after[1] else ''}{after[1]}")

    def _retire(
        self, wanted: dict[str, RegisteredAdapter], loaded: dict[Host, set[str]], changes: list[str]
    ) -> list[str]:
        """Stop routing to what the registry no longer wants; names to unload. Refused versions are unloaded too."""
        with self._changed:
            for capability, name in list(self._routes.items()):
                kept = {n for n, a in wanted.items() if a.capability == capability}
                # A champion that is not live yet leaves the version before it in its place.
                if name not in wanted and (not kept or self._entries[name].state is not AdapterState.LIVE):
                    del self._routes[capability]
            routed = set(self._routes.values())
            for name, entry in self._entries.items():
                if name not in wanted and name not in routed and entry.state is not AdapterState.DRAINING:
                    entry.state, entry.live_since = AdapterState.DRAINING, None
                    entry.reason = "replaced or withdrawn"
                    self._retired[name] = time.monotonic()
                    changes.append(f"{name} is draining")
            gone = [n for n, e in self._entries.items() if e.state is AdapterState.DRAINING]
            gone += [n for n, e in self._entries.items() if e.state is AdapterState.REFUSED]
            known = set(self._entries)
        for name in {n for names in loaded.values() for n in names} - known:
            if self._ours(name):
                self._retired.setdefault(name, time.monotonic())
                gone.append(name)
        return [n for n in gone if time.monotonic() - self._retired.get(n, -1e9) >= self.linger_seconds]

    def _ours(self, name: str) -> bool:
        """Whether a loaded name is a version in this registry; other names are left alone."""
        match = _SERVED_NAME.fullmatch(name)
        if match is None:
            return False
        try:
            return any(v.served_name == name for v in _asked(lambda: self.registry.versions(match["capability"])))
        except TraceError as problem:  # what cannot be a capability's name, or a registry that is away
            logger.warning("%s is left loaded: %s", name, problem)
            return False

    def _unload(self, gone: Sequence[str], loaded: dict[Host, set[str]], changes: list[str]) -> None:
        """Wait for requests in flight on `gone`, then take them from all hosts that answer."""
        deadline = time.monotonic() + self.drain_seconds
        for name in gone:
            with self._changed:
                entry = self._entries.get(name)
                while entry is not None and entry.in_flight and time.monotonic() < deadline:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
                cut = entry.in_flight if entry is not None else 0
            for host, names in loaded.items():
                if name in names:
                    try:
                        host.unload(name)
                    except TraceError as problem:
                        logger.warning("%s was not unloaded: %s", name, problem)
                        continue
                    where = host.address or "the local model"
                    changes.append(f"{name} unloaded from {where}" + (f", {cut} requests cut off" if cut else ""))
            with self._changed:
                self._retired.pop(name, None)
                if entry is not None and entry.state is AdapterState.DRAINING:
                    del self._entries[name]


def _asked(call: Callable[[], T]) -> T:
    """What the registry says; its own failures as `StoreError`."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as problem:
        raise StoreError(f"the registry does not answer: {problem}; what is served stays as it is") from problem
