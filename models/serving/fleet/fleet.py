"""A release on all servers: load, prove, swap, drain, unload (contract: `models/serving/fleet/lifecycle.py`).

The order is what keeps promotions free of failures and of mixtures. All members of another release are loaded and
proven while the one before answers; then routes and router change together, in one assignment; then what is no longer
wanted is drained and unloaded. A release with a member that cannot be loaded or proven is not served at all: the one
before goes on whole (at the start the base alone), and the reason is told. Servers that forgot (restart) get everything
again; names that the registry knows but that are not wanted are taken from them; names unknown to it are left alone.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from errors import AdapterError, StoreError, TraceError
from models.adapters.files import RegisteredAdapter
from models.adapters.fingerprint import prove, read_fingerprint
from models.adapters.limits import ServerLimits, check_limits
from models.serving.fleet.hosts import Host
from models.serving.fleet.lifecycle import AdapterState, ServedAdapter
from models.serving.fleet.releases import Generation, Releases, ServedRelease, Standing, answered, identity, title

logger = logging.getLogger("trace.models")
Loaded = dict[Host, set[str]]
_SERVED_NAME = re.compile(r"(?P<capability>.+)@v(?P<version>\d+)-(?P<sha8>[0-9a-f]{8})")


@dataclass
class _Entry:
    """A version that is or was wanted. `proven` are the hosts that it was proven live on at the last look."""

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

    `drain_seconds` is the longest that a replaced version waits for requests in flight; above the longest that one may
    take, none is cut off. Where several gateways share the servers give `linger_seconds` above their reconciling
    interval: a replaced version then stays loaded that long, for those who have not heard yet.
    """

    def __init__(
        self,
        releases: Releases,
        hosts: Sequence[Host],
        folder: Path,
        limits: ServerLimits,
        drain_seconds: float = 60.0,
        linger_seconds: float = 0.0,
    ) -> None:
        self.releases, self.hosts, self.folder, self.limits = releases, tuple(hosts), folder, limits
        self.drain_seconds, self.linger_seconds = drain_seconds, linger_seconds
        self._one = threading.Lock()  # one reconciliation at a time; guards the next two
        self._release: ServedRelease | None = None  # behind the generation
        self._seen: object = ()  # what was live at the last reconciliation; () has `follow` reconcile
        self._changed = threading.Lock()  # guards all that follows
        self._entries: dict[str, _Entry] = {}
        self._generation = Generation()
        self._requests: Counter[Generation] = Counter()
        self._wanted, self._problem = 0, ""
        self._up: list[Host] = []
        self._retired: dict[str, float] = {}  # name -> when requests stopped to be sent to it

    # --- for requests -----------------------------------------------------------------------------------------

    def adapters(self) -> list[ServedAdapter]:
        """All versions that are served, made ready, drained or refused, by capability and version."""
        with self._changed:
            found = [e.served() for e in self._entries.values()]
        return sorted(found, key=lambda a: (a.capability, int(a.version)))

    def standing(self) -> Standing:
        """What is served, and what should be."""
        with self._changed:
            return Standing(self._generation, self._wanted, self._problem)

    def replicas(self) -> list[str]:
        """Addresses of the servers that answered at the last look (empty for the local model)."""
        with self._changed:
            return [h.address for h in self._up if h.address]

    def enter(self) -> Generation:
        """A request begins: the generation that it is served by, which stays loaded until `leave`."""
        with self._changed:
            self._requests[self._generation] += 1
            return self._generation

    def acquire(self, generation: Generation, capability: str) -> ServedAdapter | None:
        """The generation's adapter of a capability, counted until `leave`; None when there is none that answers."""
        with self._changed:
            entry = self._entries.get(generation.members.get(capability, ""))
            if entry is None or not entry.proven:
                return None
            entry.in_flight += 1
            return entry.served()

    def leave(self, generation: Generation, name: str = "") -> None:
        """The request that entered `generation`, and acquired `name` of it, is answered."""
        with self._changed:
            self._requests[generation] -= 1
            if self._requests[generation] <= 0:
                del self._requests[generation]
            entry = self._entries.get(name)
            if entry is not None and entry.in_flight:
                entry.in_flight -= 1

    def report(self, name: str, replica: str = "") -> None:
        """A server did not know `name`: it is not handed out there again before it was proven anew."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return
            entry.proven = [h for h in entry.proven if h.address != replica]
            self._seen = ()  # whoever forgot one has most likely forgotten all
            if not entry.proven and entry.state is AdapterState.LIVE:
                entry.state, entry.live_since = AdapterState.UNREACHABLE, None
                entry.reason = f"{replica or 'the model'} no longer knew it; it is loaded again within seconds"
        logger.warning("adapter %s is missing on %s", name, replica or "the local model")

    # --- reconciling ------------------------------------------------------------------------------------------

    def reconcile(self) -> list[str]:
        """Make the hosts serve the live release, and prove all of it again; what changed, one line each.

        Raises `StoreError` when the database or the registry does not answer: what is served was looked after still.
        """
        with self._one:
            try:
                wanted = answered(self.releases.live)
            except StoreError:
                self._reconcile(self._release)
                raise
            return self._reconcile(wanted)

    def follow(self) -> list[str]:
        """Reconcile if another release is live than at the last time, or a name was reported; unload what is drained.
        Cheap when neither is so. Raises as `reconcile` does."""
        with self._one:
            wanted = answered(self.releases.live)
            if identity(wanted) != self._seen:
                return self._reconcile(wanted, anew=False)
            with self._changed:
                drained = [n for n, e in self._entries.items() if e.state is AdapterState.DRAINING and self._may_go(n)]
            changes: list[str] = []
            if drained:
                self._unload(drained, self._look(changes), changes)
            return changes

    def _reconcile(self, wanted: ServedRelease | None, anew: bool = True) -> list[str]:
        """`anew`: what is loaded and was proven is proven again too."""
        changes: list[str] = []
        loaded = self._look(changes)
        self._seen = seen = identity(wanted)
        problem, another = "", seen != identity(self._release)
        proven = set[str]() if anew else self._proven(loaded)
        try:
            if another:
                problem = self._make_ready(wanted, loaded, changes, proven)
                if not problem:
                    self._swap(wanted, changes)
            if not another or problem:
                self._make_ready(self._release, loaded, changes, proven)
        except Exception as unexpected:
            if another:
                self._tell(wanted, f"{type(unexpected).__name__}: {unexpected}")
            raise
        self._tell(wanted, problem)
        self._retire(wanted, changes)
        self._unload(self._gone(loaded), loaded, changes)
        return changes

    def _make_ready(self, release: ServedRelease | None, loaded: Loaded, changes: list[str], proven: set[str]) -> str:
        """Load and prove all members that are not yet in `proven`; why the release cannot be served whole, or ""."""
        if release is None or release.problem:
            return release.problem if release else ""
        reasons = []
        for adapter in release.members.values():
            name = adapter.served_name
            if name not in proven:
                self._serve(name, adapter, loaded, changes)
                proven.add(name)
            with self._changed:
                entry = self._entries[name]
            if not entry.proven:
                reasons.append(f"{name} is {entry.state}: {entry.reason}")
        return "; ".join(reasons)

    def _proven(self, loaded: Loaded) -> set[str]:
        """Names that all hosts that answer (at least one) have, and were proven with."""
        with self._changed:
            known = [n for n, e in self._entries.items() if loaded and loaded.keys() <= set(e.proven)]
        return {name for name in known if all(name in names for names in loaded.values())}

    def _swap(self, release: ServedRelease | None, changes: list[str]) -> None:
        """From here on requests enter `release`: its routes and its router, in one assignment."""
        after = Generation.of(release)
        with self._changed:
            before, self._generation = self._generation, after
            for name in after.members.values():
                entry = self._entries[name]
                if entry.state is AdapterState.DRAINING:
                    entry.reason = ""
                    self._retired.pop(name, None)
                entry.state, entry.live_since = AdapterState.LIVE, entry.live_since or after.since
        self._release = release
        changes.append(f"{title(after.number)} is served, before it {title(before.number)}")

    def _tell(self, wanted: ServedRelease | None, problem: str) -> None:
        """Keep, and log once, that another release than the live one is served."""
        number = wanted.number if wanted else 0
        with self._changed:
            told = (self._wanted, self._problem) == (number, problem)
            serving = self._generation.number
        if problem and not told:  # before it is seen in the status: who has read that finds it in the log
            logger.warning("%s is not served, %s goes on: %s", title(number), title(serving), problem)
        with self._changed:
            self._wanted, self._problem = number, problem

    def _fetch(self, adapter: RegisteredAdapter) -> Path:
        """The adapter's folder with the registered bytes; one that was changed is fetched again (servers read it again
        when their memory is full)."""
        try:
            return answered(lambda: self.releases.download(adapter, self.folder))
        except AdapterError as problem:
            folder = self.folder / adapter.served_name
            if not folder.is_dir():
                raise
            logger.warning("%s; fetching it again", problem)
            shutil.rmtree(folder)
            return answered(lambda: self.releases.download(adapter, self.folder))

    def _look(self, changes: list[str]) -> Loaded:
        """What each host that answers has loaded."""
        loaded: Loaded = {}
        for host in self.hosts:
            try:
                loaded[host] = host.names()
            except Exception as problem:  # one host's, which keeps no release from the others
                defect = None if isinstance(problem, TraceError) else problem
                logger.warning("%s is left out: %s", host.address or "the local model", problem, exc_info=defect)
        with self._changed:
            for host in self.hosts:
                if (host in loaded) != (host in self._up):
                    changes.append(f"{host.address or 'the local model'} {'answers' if host in loaded else 'is away'}")
            self._up = list(loaded)
        return loaded

    def _serve(self, name: str, adapter: RegisteredAdapter, loaded: Loaded, changes: list[str]) -> None:
        """Load and prove a version on every host that answers. One that is live and whose files are gone goes on where
        it is loaded, with the reason."""
        with self._changed:
            entry = self._entries.setdefault(name, _Entry(adapter))
            before = (entry.state, entry.reason)
        proven: list[Host] = []
        reasons: list[str] = []
        folder, refused = None, False
        try:
            folder = self._fetch(adapter)
            check_limits(folder, self.limits, adapter.tags)
        except (TraceError, OSError) as problem:
            reasons.append(str(problem))
            folder, refused = None, not isinstance(problem, StoreError)
        if folder is not None or before[0] is AdapterState.LIVE:
            for host in loaded:
                try:
                    if self._prove(host, adapter, folder, loaded[host], changes):
                        proven.append(host)
                except TraceError as problem:  # one host's, which keeps no release from the others
                    named = host.address in str(problem)
                    reasons.append(str(problem) if named else f"{host.address}: {problem}")
                    refused = refused or isinstance(problem, AdapterError)
        with self._changed:
            entry.proven = proven
            if proven:
                served = name in self._generation.members.values()
                entry.state = AdapterState.LIVE if served else AdapterState.READY
                entry.live_since = (entry.live_since or time.time()) if served else None
            else:
                entry.state = AdapterState.REFUSED if refused else AdapterState.UNREACHABLE
                entry.live_since = None
            entry.reason = "; ".join(reasons)
            if not proven and not reasons:
                entry.reason = "no server answers"
            self._retired.pop(name, None)
            after = (entry.state, entry.reason)
        if before != after:
            changes.append(f"{name} is {after[0]}{': ' if after[1] else ''}{after[1]}")

    def _prove(
        self, host: Host, adapter: RegisteredAdapter, folder: Path | None, names: set[str], changes: list[str]
    ) -> bool:
        """Whether a host has a version and scores as it should. It is loaded first, if its files are there."""
        name = adapter.served_name
        expected = read_fingerprint(adapter.tags, name)
        if name not in names:
            if folder is None:
                return False
            host.load(name, adapter.sha256, folder)
            names.add(name)
            changes.append(f"{name} loaded on {host.address or 'the local model'}")
        prove(host, expected, name)
        return True

    def _retire(self, wanted: ServedRelease | None, changes: list[str]) -> None:
        """What is neither served nor wanted takes no more requests."""
        kept = {a.served_name for a in wanted.members.values()} if wanted else set[str]()
        with self._changed:
            kept |= set(self._generation.members.values())
            for name, entry in self._entries.items():
                if name not in kept and entry.state is not AdapterState.DRAINING:
                    entry.state, entry.live_since = AdapterState.DRAINING, None
                    entry.reason = "replaced or withdrawn"
                    self._retired[name] = time.monotonic()
                    changes.append(f"{name} is draining")

    def _gone(self, loaded: Loaded) -> list[str]:
        """Names to unload: what is drained, what was refused, and versions that the hosts have from another time."""
        with self._changed:
            known = set(self._entries)
        strangers = {n for names in loaded.values() for n in names} - known
        ours = sorted(name for name in strangers if self._ours(name))
        with self._changed:
            for name in ours:
                self._retired.setdefault(name, time.monotonic())
            leaving = (AdapterState.DRAINING, AdapterState.REFUSED)
            gone = [n for n, e in self._entries.items() if e.state in leaving]
            return [n for n in (*gone, *ours) if self._may_go(n)]

    def _may_go(self, name: str) -> bool:
        """Whether no request needs a name any more, or it waited long enough. Called with the lock held."""
        entry, now = self._entries.get(name), time.monotonic()
        if entry is not None and entry.state is AdapterState.REFUSED:
            return not entry.in_flight
        waited = now - self._retired.get(name, now)
        if waited < self.linger_seconds:
            return False
        if entry is None or waited >= self.drain_seconds:
            return True
        entered = (g for g in self._requests if g is not self._generation)
        return not entry.in_flight and not any(name in g.members.values() for g in entered)

    def _ours(self, name: str) -> bool:
        """Whether a loaded name is a version in this registry; other names are left alone."""
        match = _SERVED_NAME.fullmatch(name)
        if match is None:
            return False
        try:
            return any(v.served_name == name for v in answered(lambda: self.releases.versions(match["capability"])))
        except TraceError as problem:  # what cannot be a capability's name, or a registry that is away
            logger.warning("%s is left loaded: %s", name, problem)
            return False

    def _unload(self, gone: Sequence[str], loaded: Loaded, changes: list[str]) -> None:
        """Take names from all hosts that answer."""
        for name in gone:
            with self._changed:
                entry = self._entries.get(name)
                cut = entry.in_flight if entry is not None else 0
            for host, names in loaded.items():
                if name in names:
                    try:
                        host.unload(name)
                    except TraceError as problem:
                        logger.warning("%s was not unloaded: %s", name, problem)
                        continue
                    names.discard(name)
                    where = host.address or "the local model"
                    changes.append(f"{name} unloaded from {where}" + (f", {cut} requests cut off" if cut else ""))
            with self._changed:
                self._retired.pop(name, None)
                if entry is not None and entry.state is AdapterState.DRAINING:
                    del self._entries[name]
