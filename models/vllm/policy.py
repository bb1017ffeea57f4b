"""The `vllm` policy backend: token ids in and out of one or more vLLM servers, many turns in flight.

What it returns is what the server sampled: ids and log-probabilities of the distribution sampled from, nothing
tokenized again. Prefixes are cached by the server, per adapter; sessions stay with one server so that its cache serves
them. All sampling settings are sent, so that a server's own defaults (generation_config.json) decide nothing.

Several servers are replicas of one policy. That they are is proven before the first turn, of the base and of every
adapter (`models/vllm/equality.py`), and again of a server that was lost and comes back (`models/vllm/turns.py`).

A turn that fails after retries ends its own episode (`Generation.problem`); when no server is left, or none knows a
name, all of them fail: then `poll` raises, and the task is tried again.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from errors import AdapterError, ConfigurationError, NotFinite, PolicyError, ProviderError, TraceError
from models.adapters.files import adapter_digest, export_adapter, round_name
from models.policy import Generation, PolicyIdentity, Request
from models.vllm.answers import Completion, ServerAway
from models.vllm.equality import check_adapter, check_base, check_live, probe
from models.vllm.server import VllmServer, body_of
from models.vllm.turns import FATAL, Turns

logger = logging.getLogger("trace.models")
STALL_SECONDS = 60.0
# In messages: what a server that comes back is compared with.
BEFORE = "the servers at the beginning"
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """An adapter: its digest, the folder that the servers read (None: another process has it), and its figures of the
    probe (nats)."""

    digest: str
    folder: Path | None
    figures: Sequence[float]


class VllmPolicy:
    """Token policy on vLLM servers that serve the same base. `concurrency` is the number of turns in flight.

    `identity` is the base's, with the renderer's fingerprint. Adapters are copied into `lora_folder`, which the servers
    see as `server_folder` (the same path when ""); None leaves them where they are. A server that does nothing for
    `stall_seconds` while turns wait on it loses them to the others.
    Raises `ServerAway` when no server is there, and `ConfigurationError` when one is not as needed.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        identity: PolicyIdentity,
        stop_ids: frozenset[int],
        concurrency: int = 64,
        lora_folder: Path | None = None,
        server_folder: str = "",
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        if not servers:
            raise ConfigurationError("no vLLM server is given; set policy.url")
        self.servers, self.stop_ids, self.rows = tuple(servers), stop_ids, concurrency
        self._identity, self._lora_folder, self._server_folder = identity, lora_folder, server_folder
        self._adapters: dict[str, Loaded] = {}
        self._unloaded: set[str] = set()  # a lost server does without these when it is back
        self._loading = threading.Lock()  # guards both
        self._tickets, self._open = count(), dict[int, str]()
        # Turns that are done, in that order, and None for each call of `wake`.
        self._done: SimpleQueue[tuple[int, Completion | TraceError] | None] = SimpleQueue()
        self.sampled_tokens, self.stall_seconds = 0, stall_seconds
        lost: dict[str, TraceError] = {}
        self.context = min(_of_each(self.servers, VllmServer.check, lost).values())
        self._base = check_base(_of_each([s for s in self.servers if s.url not in lost], probe, lost))
        self._turns = Turns(self.servers, concurrency, stall_seconds, self._restore, lost)

    def close(self) -> None:
        """Take this policy's adapters from the servers, end threads and connections."""
        self._abandon()
        for name in list(self._adapters):
            try:
                self.unload_adapter(name)
            except PolicyError as problem:
                logger.warning("adapter %s stays loaded: %s", name, problem)
        self._turns.close()
        for server in self.servers:
            server.close()

    # --- servers ----------------------------------------------------------------------------------------------

    def on_each(self, call: Callable[[VllmServer], T]) -> dict[str, T]:
        """What `call` gives on each server in use, by address. One that cannot be reached is lost, until it is back;
        raises its problem when none is left, and every other problem at once."""
        lost: dict[str, TraceError] = {}
        used = self._turns.used()
        try:
            return _of_each(used or self.servers, call, lost)
        finally:
            for server in used:
                if server.url in lost:
                    self._turns.lose(server, lost[server.url])

    def _restore(self, server: VllmServer) -> None:
        """Prove that a server that was lost is what it was, and give it the adapters that it forgot."""
        server.models()  # one try, told to nobody: the next look comes soon
        context = server.check()
        if context < self.context:
            raise ConfigurationError(
                f"{server.url} came back with a context of {context} tokens, it was {self.context} or more; start it "
                "with the --max-model-len of before"
            )
        check_base({BEFORE: self._base, server.url: probe(server)})
        with self._loading:
            there = server.models()
            for name, loaded in self._adapters.items():
                if name not in there:
                    if loaded.folder is None:  # the process that has its files gives it back
                        continue
                    server.load(name, self._seen(loaded.folder))
                check_adapter(name, {BEFORE: loaded.figures, server.url: probe(server, name)}, self._base)
            for name in self._unloaded & set(there):
                server.unload(name)

    # --- adapters ---------------------------------------------------------------------------------------------

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        """Identity with the adapter's content hash."""
        mine = self._identity
        digest = "" if adapter is None else self._adapter(adapter).digest
        return PolicyIdentity(mine.base, mine.revision, mine.dtype, digest, mine.renderer)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters loaded by this policy."""
        return tuple(self._adapters)

    def _adapter(self, name: str) -> Loaded:
        try:
            return self._adapters[name]
        except KeyError:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise PolicyError(f"adapter {name!r} is not loaded (loaded: {known}); load it first") from None

    def adapter_name(self, capability: str, origin: str, digest: str) -> str:
        """A name for ever: servers keep what they computed by name, and may serve other rounds too."""
        return round_name(capability, origin, digest)

    def load_adapter(self, name: str, digest: str, folder: Path) -> None:
        """Load a PEFT folder (not to be changed afterwards) under a name that was never used, on every server in use,
        and prove that it is the same adapter on all. A server whose base is another than at the beginning is lost: it
        was started again while no turn waited on it. Raises `AdapterError` for an adapter that a server refuses or
        drops, and `NotFinite` for one that has come apart."""
        if name in self._adapters:
            raise AdapterError(f"adapter name {name!r} was used before; a server's caches need a new one")
        shared = self._shared(name, folder)
        with self._loading:
            try:
                scores = self.on_each(partial(self._loaded_on, name=name, path=self._seen(shared)))
                figures = check_adapter(name, scores, self._base)
                check_live(name, ", ".join(scores), figures, self._base, shared)
            except (AdapterError, ConfigurationError, NotFinite):
                self._unload(name)  # from those that took it
                raise
            self._use(name, Loaded(digest, shared, figures))

    def _loaded_on(self, server: VllmServer, name: str, path: str) -> list[float]:
        """The figures of an adapter that is loaded on a server now. Raises what loses one that has another base."""
        try:
            check_base({BEFORE: self._base, server.url: probe(server)})
        except ConfigurationError as problem:
            raise ProviderError(str(problem), transient=True) from problem
        server.load(name, path)
        return probe(server, name)

    def know_adapter(self, name: str, digest: str) -> None:
        """Sample with an adapter that another process has loaded on the servers and keeps there. This one has no
        files of it, and leaves it loaded when it closes. Raises `AdapterError` where the servers differ in it."""
        if name not in self._adapters:
            figures = check_adapter(name, self.on_each(partial(probe, adapter=name)), self._base)
            with self._loading:
                self._use(name, Loaded(digest, None, figures))

    def _use(self, name: str, loaded: Loaded) -> None:
        """Under `_loading`. A name that was unloaded may be loaded again: a server that comes back is to keep it."""
        self._unloaded.discard(name)
        self._adapters[name] = loaded

    def unload_adapter(self, name: str) -> None:
        """Take the adapter from every server, if this process loaded it; one that is lost does without it when it is
        back."""
        mine = self._adapter(name).folder is not None
        with self._loading:
            del self._adapters[name]
            if mine:
                self._unload(name)

    def _unload(self, name: str) -> None:
        self._unloaded.add(name)
        try:
            self.on_each(lambda server: server.unload(name))
        except ServerAway as problem:
            logger.warning("adapter %s was not unloaded: %s", name, problem)

    def _shared(self, name: str, folder: Path) -> Path:
        """The folder where servers read it: itself, or its copy in the folder that they share with this process.
        Raises `AdapterError` for a copy that was changed since an earlier process made it."""
        if self._lora_folder is None or folder.resolve().is_relative_to(self._lora_folder.resolve()):
            return folder
        shared = self._lora_folder / name
        if shared.exists():
            with suppress(OSError):  # another user's
                os.utime(shared)  # 'trace-agent clean' goes by when it was last needed
        else:
            _appear(folder, shared)
        if adapter_digest(shared) != adapter_digest(folder):
            raise AdapterError(f"{shared} is not what was trained; remove it and start again")
        return shared

    def _seen(self, folder: Path) -> str:
        """The folder's path as the servers see it."""
        if self._lora_folder is None or not self._server_folder:
            return str(folder.resolve())
        inside = folder.resolve().relative_to(self._lora_folder.resolve())
        return f"{self._server_folder.rstrip('/')}/{inside.as_posix()}"

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Send one turn. Raises `ContextOverflow` before anything is sent if it cannot fit."""
        if request.adapter is not None:
            self._adapter(request.adapter)
        request.check(self.context, "start the server with a larger --max-model-len")
        body = body_of(request, request.adapter or self.servers[0].model, self.stop_ids)
        ticket = next(self._tickets)
        self._open[ticket] = request.session
        self._turns.send(request.session, body, lambda answer: self._done.put((ticket, answer)))

    def wake(self) -> None:
        """Have `poll` return at once; from any thread."""
        self._done.put(None)

    def poll(self) -> list[Generation]:
        """Wait until at least one turn is finished, or `wake` is called; [] when nothing is in flight. Raises what no
        turn would survive; then nothing is in flight any more."""
        finished: list[Generation] = []
        for ticket, answer in self._taken() if self._open else []:
            session = self._open.pop(ticket)
            if isinstance(answer, FATAL):
                self._abandon()
                raise answer
            if isinstance(answer, TraceError):
                finished.append(Generation(session, (), (), "error", answer))
            else:
                reason = "stop" if answer.ids[-1] in self.stop_ids else "length"
                finished.append(Generation(session, answer.ids, answer.logprobs, reason))
        self.sampled_tokens += sum(len(g.ids) for g in finished)
        return finished

    def _taken(self) -> list[tuple[int, Completion | TraceError]]:
        """Turns that are done: all there are, after waiting for one or for `wake`."""
        taken = [self._done.get()]
        while True:
            try:
                taken.append(self._done.get_nowait())
            except Empty:  # what was abandoned is no longer open
                return [turn for turn in taken if turn is not None and turn[0] in self._open]

    def cancel(self, session: str) -> None:
        """Give up a session's turn. One that is on its way is answered for nobody."""
        for ticket in [ticket for ticket, mine in self._open.items() if mine == session]:
            del self._open[ticket]

    def release(self, session: str) -> None:
        """The session's server need not be remembered; its cache forgets by itself."""
        self._turns.forget(session)

    def free_buffers(self) -> None:
        """Nothing to do: the memory is the server's."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Finish all `requests` and return the answers in the order of the requests. Raises the first problem."""
        for request in requests:
            self.submit(request)
        done: dict[str, Generation] = {}
        while len(done) < len(requests):
            done |= {generation.session: generation for generation in self.poll()}
        problem = next((g.problem for g in done.values() if g.problem is not None), None)
        if problem is not None:
            raise problem
        return [done[request.session] for request in requests]

    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]:
        """Log-probabilities (nats, temperature 1) of the last `count` of `ids`, on the first server in use."""
        if adapter is not None:
            self._adapter(adapter)
        while True:
            (server, *_) = self._turns.used() or self.servers
            try:
                return server.score(ids, count, adapter)
            except ProviderError as problem:
                if not problem.transient or len(self._turns.used()) < 2:
                    raise
                self._turns.lose(server, problem)

    def _abandon(self) -> None:
        self._turns.cancel()
        self._open.clear()


def _appear(folder: Path, shared: Path) -> None:
    """Copy an adapter to where servers read it. It appears whole, and what cannot be finished leaves nothing; another
    process may do the same at the same moment."""
    part = shared.with_name(f".{shared.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # of a process with this number that died here
    try:
        export_adapter(folder, part)
        try:
            part.rename(shared)
        except OSError:
            if not shared.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _of_each(
    servers: Sequence[VllmServer], call: Callable[[VllmServer], T], lost: dict[str, TraceError]
) -> dict[str, T]:
    """What `call` gives on each server, by address. One that cannot be reached, of several, is put into `lost`."""
    found: dict[str, T] = {}
    for server in servers:
        try:
            found[server.url] = call(server)
        except ProviderError as problem:
            if not problem.transient:
                raise
            lost[server.url] = problem
    if not found:
        raise next(iter(lost.values()))
    return found
