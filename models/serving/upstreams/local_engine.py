"""The local model as a server needs it: one thread owns the policy, any number of callers wait for tokens.

Turns are sampled together when they use one adapter and one shared prefix. Turns of another adapter wait for the batch
to end, and once the first of them has waited `PATIENCE` seconds, nothing more joins the batch: no adapter starves
another. Work on the policy itself (routing, loading an adapter) runs between two forward passes, or, `alone`, when no
turn is in flight.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from errors import NotFinite, PolicyError, ProviderError, TraceError
from models.adapters.deltas import folder_deltas
from models.local.policy import LocalPolicy
from models.out_of_memory import let_go, missing
from models.policy import Generation, Request
from models.serving.upstreams.contract import Replica

logger = logging.getLogger("trace.models")
T = TypeVar("T")
PATIENCE = 2.0
# Texts whose scores under the base are kept.
MOST_TEXTS = 64


@dataclass(eq=False)
class _Turn:
    """A turn that a caller waits for. Parts go to `parts` in the caller's event loop."""

    request: Request
    loop: asyncio.AbstractEventLoop
    parts: asyncio.Queue[list[int] | Generation | TraceError]
    streamed: bool
    since: float = field(default_factory=time.monotonic)
    told: int = 0

    @property
    def key(self) -> tuple[str | None, tuple[int, ...]]:
        return self.request.adapter, tuple(self.request.prompt[: self.request.shared])

    def tell(self, part: list[int] | Generation | TraceError) -> None:
        """Hand a part over, unless the caller's loop is closed."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    future: Future[Any]
    alone: bool


class LocalEngine:
    """Use as a context manager, or `start` and `stop`. Thread-safe. `ended` is called by the thread when it ends though
    nobody stopped it: nothing in this process starts it again, so a server had better end, too."""

    def __init__(self, policy: LocalPolicy, ended: Callable[[], object] = lambda: None) -> None:
        self.policy, self._ended = policy, ended
        self._inbox: queue.SimpleQueue[_Turn | _Call | str | None] = queue.SimpleQueue()
        self._waiting: deque[_Turn] = deque()
        self._sampling: dict[str, _Turn] = {}
        self._alone: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self._open = False
        self._count = 0

    def start(self) -> None:
        """Begin to work."""
        if self._thread is None:
            self._open = True
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread; callers that still wait get an error."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> LocalEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def load(self) -> int:
        """Turns that wait or are being sampled."""
        return len(self._waiting) + len(self._sampling)

    def call(self, work: Callable[[], T], alone: bool = False) -> Future[T]:
        """Run `work` in the thread that owns the policy; `alone`: while no turn is in flight."""
        future: Future[T] = Future()
        self._post(_Call(work, future, alone))
        return future

    @property
    def context(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self.policy.context

    async def replicas(self) -> list[Replica]:
        """This process."""
        return [Replica("this process", self.alive, "" if self.alive else "the model's thread has ended; start again")]

    async def close(self) -> None:
        """Stop the thread; callers that still wait get an error."""
        await asyncio.to_thread(self.stop)

    async def generate(
        self, request: Request, streamed: bool = False, holders: Sequence[str] = ()
    ) -> AsyncGenerator[list[int] | Generation]:
        """Sample one turn: new ids as they come (when `streamed`), and at last the whole `Generation`.

        A caller that stops iterating (or is cancelled) ends the turn. Raises what `LocalPolicy.submit` raises.
        """
        self._count += 1
        mine = replace(request, session=f"{request.session}#{self._count}")
        turn = _Turn(mine, asyncio.get_running_loop(), asyncio.Queue(), streamed)
        self._post(turn)
        over = False
        try:
            while not over:
                part = await turn.parts.get()
                over = not isinstance(part, list)
                if isinstance(part, TraceError):
                    raise part
                yield part
        finally:
            if not over:
                self._inbox.put(mine.session)

    def _post(self, item: _Turn | _Call) -> None:
        with self._closing:
            if not self._open:
                raise ProviderError("the local model is not running; start its engine", transient=True)
            self._inbox.put(item)

    def refused(self, problem: torch.OutOfMemoryError) -> ProviderError:
        """What callers are told of work that the GPU had no memory for; for the engine's thread, which frees what the
        work held."""
        if not self.policy.busy:
            self.policy.free_buffers()
        return _refused(problem)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                self._calls_alone()
                if not self._alone:
                    self._admit()
                if self.policy.busy:
                    self._step()
        except BaseException:
            logger.exception("the local model's thread has ended")
            try:
                self._end()
            finally:
                self._ended()
        else:
            self._end()

    def _step(self) -> None:
        """One forward pass. One that fails costs the turns in flight, and no later one: memory that a CPU lacks, and
        what a GPU's libraries report, have no class of their own."""
        try:
            finished = self.policy.step()
        except Exception as problem:
            known = isinstance(problem, torch.OutOfMemoryError)
            logger.error("a pass of the local model failed: %s", problem, exc_info=not known)
            self.policy.close()  # if this fails, the thread ends, and `_end` tells the turns
            _check_gpu()
            turns, self._sampling = list(self._sampling.values()), {}
            refused = _refused(problem)
            logger.error("%d turns in flight are refused: %s", len(turns), refused)
            for turn in turns:
                turn.tell(refused)
        else:
            self._deliver(finished)

    def _take(self) -> bool:
        """Everything in the inbox; waits only when there is nothing else to do. False: stop."""
        idle = not self.policy.busy and not self._waiting and not self._alone
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if item is None:
                return False
            if isinstance(item, _Turn):
                self._waiting.append(item)
            elif isinstance(item, str):
                self._cancel(item)
            elif item.alone:
                self._alone.append(item)
            else:
                self._do(item)

    def _cancel(self, session: str) -> None:
        self._waiting = deque(turn for turn in self._waiting if turn.request.session != session)
        if self._sampling.pop(session, None) is not None:
            self.policy.cancel(session)

    def _calls_alone(self) -> None:
        while self._alone and not self.policy.busy:
            self._do(self._alone.popleft())

    def _do(self, call: _Call) -> None:
        """Run a call; what it raises is its caller's."""
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            call.future.set_result(call.work())
        except torch.OutOfMemoryError as problem:
            call.future.set_exception(self.refused(problem))
        except Exception as problem:  # carried to the caller, who is in another thread
            call.future.set_exception(problem)
            _check_gpu()

    def _admit(self) -> None:
        """Hand the turns that may join the batch to the policy."""
        if not self._waiting:
            return
        if self._sampling:
            key = next(iter(self._sampling.values())).key
            odd = next((turn for turn in self._waiting if turn.key != key), None)
            if odd is not None and time.monotonic() - odd.since > PATIENCE:
                return
        else:
            key = self._waiting[0].key
        stay: deque[_Turn] = deque()
        for turn in self._waiting:
            if turn.key != key or len(self._sampling) >= self.policy.rows:
                stay.append(turn)
                continue
            try:
                self.policy.submit(turn.request)
            except PolicyError as problem:
                turn.tell(problem)
            else:
                self._sampling[turn.request.session] = turn
        self._waiting = stay

    def _deliver(self, finished: Sequence[Generation]) -> None:
        for session, ids in self.policy.sampled().items():
            turn = self._sampling[session]
            if turn.streamed and len(ids) > turn.told:
                turn.tell(ids[turn.told :])
                turn.told = len(ids)
        for generation in finished:
            self._sampling.pop(generation.session).tell(generation)
            self.policy.release(generation.session)

    def _end(self) -> None:
        """Fail all callers that still wait: the thread has ended, in whatever way."""
        with self._closing:
            self._open = False
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Turn):
                self._waiting.append(item)
            elif isinstance(item, _Call):
                self._alone.append(item)
        gone = ProviderError("the local model was stopped; ask again when it is up", transient=True)
        for turn in (*self._waiting, *self._sampling.values()):
            turn.tell(gone)
        for session in list(self._sampling):
            self._cancel(session)
        for call in self._alone:
            if call.future.set_running_or_notify_cancel():  # who left has cancelled it, and hears nothing
                call.future.set_exception(gone)
        self._waiting.clear()
        self._alone.clear()


def _check_gpu() -> None:
    """Raises what has broken the GPU's context, if it is broken: nothing will work on it in this process any more."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _refused(problem: Exception) -> ProviderError:
    """What callers are told of a pass that failed; what the pass held is free again."""
    if isinstance(problem, NotFinite):  # the same weights would answer so again
        return ProviderError(f"{problem} (trace-agent rollback)")
    if not isinstance(problem, torch.OutOfMemoryError):
        let_go(problem)
        return ProviderError("a pass of the local model failed, its log says why; ask again", transient=True)
    what = missing(problem)
    let_go(problem)
    return ProviderError(
        f"the GPU that the local model runs on has no memory left ({what}); ask again later or with less text, give "
        "the model a GPU that nothing else fills, or serve it on vLLM (policy.backend = 'vllm')",
        transient=True,
    )


class EngineHost:
    """The engine as a fleet's host (`models/serving/fleet/hosts.py`). It loads between two forward passes, and
    scores and unloads while no turn is in flight. Scores of the base, which does not change, are kept: each waits for
    the turns in flight, and adapters of one target are all proven on the same text."""

    address = ""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._base: dict[tuple[tuple[int, ...], int], list[float]] = {}

    def names(self) -> set[str]:
        return self._engine.call(lambda: set(self._engine.policy.adapters)).result()

    def load(self, name: str, digest: str, folder: Path) -> None:
        _, deltas = folder_deltas(folder)
        self._engine.call(lambda: self._engine.policy.load_deltas(name, digest, deltas)).result()

    def unload(self, name: str) -> None:
        self._alone(lambda policy: policy.unload_adapter(name) if name in policy.adapters else None)

    def score(self, ids: Sequence[int], count: int, adapter: str | None = None) -> list[float]:
        if adapter is not None:
            return self._alone(lambda policy: policy.score(ids, count, adapter))
        key = (tuple(ids), count)
        if key not in self._base:
            if len(self._base) >= MOST_TEXTS:
                self._base.clear()
            self._base[key] = self._alone(lambda policy: policy.score(ids, count))
        return self._base[key]

    def _alone(self, work: Callable[[LocalPolicy], T]) -> T:
        return self._engine.call(lambda: work(self._engine.policy), alone=True).result()
