"""The `vllm` policy backend: token ids in and out of one or more vLLM servers, many turns in flight.

What it returns is what the server sampled: ids and log-probabilities of the distribution sampled from, nothing
tokenized again. Prefixes are cached by the server, per adapter; sessions stay with one server so that its cache serves
them. All sampling settings are sent, so that a server's own defaults (generation_config.json) decide nothing.

A turn that fails after retries ends its own episode (`Generation.problem`); a server that is gone, or does not know a
name, fails all of them: then `poll` raises, and the task is tried again.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from errors import AdapterError, ConfigurationError, PolicyError, TraceError
from models.adapters.files import adapter_digest, export_adapter
from models.policy import Generation, PolicyIdentity, Request, Sampling
from models.vllm.server import ModelMissing, ServerAway, VllmServer

logger = logging.getLogger("trace.models")


class VllmPolicy:
    """Token policy on vLLM servers that serve the same base. `concurrency` is the number of turns in flight.

    `identity` is the base's, with the renderer's fingerprint. Adapters are copied into `lora_folder`, which the servers
    see as `server_folder` (the same path when ""); None leaves them where they are.
    Raises `ServerAway` or `ConfigurationError` when a server is not there or not as needed.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        identity: PolicyIdentity,
        stop_ids: frozenset[int],
        concurrency: int = 64,
        lora_folder: Path | None = None,
        server_folder: str = "",
    ) -> None:
        if not servers:
            raise ConfigurationError("no vLLM server is given; set policy.url")
        self.servers, self.stop_ids, self.rows = tuple(servers), stop_ids, concurrency
        self.context = min(server.check() for server in servers)
        self._identity, self._lora_folder, self._server_folder = identity, lora_folder, server_folder
        # Digest and folder by name; no folder of what another process has loaded.
        self._adapters: dict[str, tuple[str, Path | None]] = {}
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm")
        self._open: dict[Future[Generation], str] = {}
        # Turns that are done, in that order, and None for each call of `wake`.
        self._done: SimpleQueue[Future[Generation] | None] = SimpleQueue()
        self._loading = threading.Lock()
        self.sampled_tokens = 0

    def close(self) -> None:
        """Take this policy's adapters from the servers, end threads and connections."""
        self._abandon()
        for name in list(self._adapters):
            try:
                self.unload_adapter(name)
            except PolicyError as problem:
                logger.warning("adapter %s stays loaded: %s", name, problem)
        for server in self.servers:
            server.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- adapters ---------------------------------------------------------------------------------------------

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        """Identity with the adapter's content hash."""
        mine = self._identity
        digest = "" if adapter is None else self._adapter(adapter)[0]
        return PolicyIdentity(mine.base, mine.revision, mine.dtype, digest, mine.renderer)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters loaded by this policy."""
        return tuple(self._adapters)

    def _adapter(self, name: str) -> tuple[str, Path | None]:
        try:
            return self._adapters[name]
        except KeyError:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise PolicyError(f"adapter {name!r} is not loaded (loaded: {known}); load it first") from None

    def adapter_name(self, capability: str, origin: str, digest: str) -> str:
        """A name for ever: servers keep what they computed by name, and may serve other rounds too."""
        return f"{capability}@{origin}-{digest[:8]}"

    def load_adapter(self, name: str, digest: str, folder: Path) -> None:
        """Load a PEFT folder (not to be changed afterwards) under a name that was never used, on every server."""
        if name in self._adapters:
            raise AdapterError(f"adapter name {name!r} was used before; a server's caches need a new one")
        shared = self._shared(name, folder)
        for server in self.servers:
            server.load(name, self._seen(shared))
        self._adapters[name] = (digest, shared)

    def know_adapter(self, name: str, digest: str) -> None:
        """Sample with an adapter that another process has loaded on the servers and keeps there. This one has no
        files of it, and leaves it loaded when it closes."""
        self._adapters.setdefault(name, (digest, None))

    def unload_adapter(self, name: str) -> None:
        """Take the adapter from every server; one that is away has forgotten it anyway."""
        _, folder = self._adapter(name)
        for server in self.servers if folder is not None else ():
            try:
                server.unload(name)
            except ServerAway as problem:
                logger.warning("adapter %s was not unloaded: %s", name, problem)
        del self._adapters[name]

    def _shared(self, name: str, folder: Path) -> Path:
        """The folder where servers read it: itself, or its copy in the folder that they share with this process.
        Raises `AdapterError` for a copy that was changed since an earlier process made it."""
        if self._lora_folder is None or folder.resolve().is_relative_to(self._lora_folder.resolve()):
            return folder
        shared = self._lora_folder / name
        if not shared.exists():
            part = export_adapter(folder, shared.with_name(f".{name}.{os.getpid()}"))
            part.rename(shared)
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
        turn = self._pool.submit(self._turn, request)
        self._open[turn] = request.session
        turn.add_done_callback(self._done.put)

    def wake(self) -> None:
        """Have `poll` return at once; from any thread."""
        self._done.put(None)

    def poll(self) -> list[Generation]:
        """Wait until at least one turn is finished, or `wake` is called; [] when nothing is in flight. Raises what no
        turn would survive; then nothing is in flight any more."""
        finished: list[Generation] = []
        for future in self._taken() if self._open else []:
            session = self._open.pop(future)
            try:
                finished.append(future.result())
            except (ServerAway, ModelMissing, ConfigurationError, AdapterError):
                self._abandon()
                raise
            except TraceError as problem:
                finished.append(Generation(session, (), (), "error", problem))
        self.sampled_tokens += sum(len(g.ids) for g in finished)
        return finished

    def _taken(self) -> list[Future[Generation]]:
        """Turns that are done: all there are, after waiting for one or for `wake`."""
        taken = [self._done.get()]
        while True:
            try:
                taken.append(self._done.get_nowait())
            except Empty:  # what was abandoned is no longer open
                return [turn for turn in taken if turn is not None and turn in self._open]

    def cancel(self, session: str) -> None:
        """Give up a session's turn. One that is on its way is answered for nobody."""
        for turn in [turn for turn, mine in self._open.items() if mine == session]:
            turn.cancel()
            del self._open[turn]

    def release(self, session: str) -> None:
        """Nothing to do: the server's cache forgets by itself."""

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
        """Log-probabilities (nats, temperature 1) of the last `count` of `ids`, on the first server."""
        if adapter is not None:
            self._adapter(adapter)
        return self.servers[0].score(ids, count, adapter)

    def _abandon(self) -> None:
        for future in self._open:
            future.cancel()
        self._open.clear()

    def _turn(self, request: Request) -> Generation:
        server = self.servers[zlib.crc32(request.session.encode()) % len(self.servers)]
        body = self._body(server, request)
        try:
            answer = server.complete(body)
        except ModelMissing:
            folder = None if request.adapter is None else self._adapter(request.adapter)[1]
            if request.adapter is None or folder is None:
                raise
            # The server was started again, or somebody unloaded the name: same files, same name, once.
            with self._loading:
                logger.warning("%s lost adapter %s; loading it again", server.url, request.adapter)
                server.load(request.adapter, self._seen(folder))
            answer = server.complete(body)
        reason = "stop" if answer.ids[-1] in self.stop_ids else "length"
        return Generation(request.session, answer.ids, answer.logprobs, reason)

    def _body(self, server: VllmServer, request: Request) -> dict[str, Any]:
        sampling: Sampling = request.sampling
        return {
            "model": request.adapter or server.model,
            "prompt": list(request.prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # Our own stop ids and no others end a turn; they are part of the answer.
            "stop_token_ids": sorted(self.stop_ids),
            "ignore_eos": True,
        }
