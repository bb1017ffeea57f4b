"""Turns on several vLLM servers: each goes to the server that has its conversation, and to another when that is lost.

A server is lost when nobody answers at its address, when three requests in a row fail, when it forgot an adapter, or
when it stalls: turns wait on it and for `stall_seconds` it neither answers nor works. Its turns go to the others at
once, with the same seeds, so no draw depends on who answers. It is tried again for as long as the policy is open, and
used again once it is proven to be what it was (`restore`).

All requests run on one event loop in a thread of its own; thousands may wait. With httpx in threads, which the rest of
this room uses, a request took four times the processor time (`benchmarks/serving.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop

from errors import AdapterError, ConfigurationError, NotFinite, PolicyError, ProviderError, TraceError
from models.vllm import server as protocol
from models.vllm.answers import (
    CANNOT_SAY,
    Completion,
    ModelMissing,
    ServerAway,
    ServerFailed,
    ServerSilent,
    come_apart,
    read_completion,
    read_document,
)
from models.vllm.balance import Balance
from models.vllm.server import COMPLETIONS, EXACT, VllmServer

logger = logging.getLogger("trace.models")

# Between tries of a server that stays away, in seconds; the first ones follow `WAITS`.
PAUSE = 5.0
# Longest wait for an answer of a server that is looked at, or gets an adapter.
CHECK_SECONDS = 120.0
# Shorter than the five seconds after which a server closes an idle connection.
IDLE_SECONDS = 2.0
# What no turn would survive.
FATAL = (ServerAway, ModelMissing, ConfigurationError, AdapterError, NotFinite)
Restore = Callable[[VllmServer], None]
Done = Callable[[Completion | TraceError], None]


@dataclass
class Replica:
    """One server, and `quick`, a client of it that waits less. `waiting` are the limits of the requests under way;
    `heard` is when it last answered or began to have any, `looked` when its count of tokens was last read since then,
    and that count; `silent` that it has none; `problem` is why it is lost."""

    server: VllmServer
    quick: VllmServer
    waiting: set[asyncio.Timeout] = field(default_factory=set)
    heard: float = 0.0
    looked: tuple[float, float | None] | None = None
    silent: bool = False
    problem: TraceError | None = None
    restoring: asyncio.Future[None] | None = None


class Turns:
    """`concurrency` turns are sent at once, others wait. `restore` proves a lost server and gives it what it forgot, in
    a thread of its own; it raises what is (still) wrong. Servers in `lost` are not used before that."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        concurrency: int,
        stall_seconds: float,
        restore: Restore,
        lost: Mapping[str, TraceError],
    ) -> None:
        self.stall_seconds = stall_seconds
        self._replicas = {server.url: Replica(server, server.limited(CHECK_SECONDS)) for server in servers}
        self._balance = Balance(list(self._replicas))
        self._restore, self._concurrency = restore, concurrency
        self._loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # turns
        self._keepers: set[asyncio.Task[None]] = set()  # what looks after servers
        self._threads = ThreadPoolExecutor(2 * len(self._replicas), thread_name_prefix="vllm-look")
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(dict(lost)), self._loop).result()

    # --- from any thread --------------------------------------------------------------------------------------

    def send(self, session: str, body: Mapping[str, Any], done: Done) -> None:
        """Have a turn answered; `done` is called with the answer, or with why there is none, in the loop's thread."""
        content = json.dumps({**body, **EXACT}).encode()
        self._loop.call_soon_threadsafe(self._begin, session, str(body["model"]), content, done)

    def forget(self, session: str) -> None:
        """The session is over."""
        self._loop.call_soon_threadsafe(self._balance.forget, session)

    def cancel(self) -> None:
        """Turns that are under way are given up; they are not `done`."""
        self._loop.call_soon_threadsafe(self._cancel)

    def used(self) -> list[VllmServer]:
        """Clients of the servers that are not lost, in their order, with `CHECK_SECONDS` for an answer."""
        return [self._replicas[address].quick for address in self._balance.used]

    def lose(self, server: VllmServer, problem: TraceError) -> None:
        """A server failed elsewhere: it is lost."""
        self._loop.call_soon_threadsafe(self._lose, self._replicas[server.url], problem)

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for replica in self._replicas.values():
            replica.quick.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- on the loop ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self, lost: dict[str, TraceError]) -> None:
        self._room, self._back = asyncio.Semaphore(self._concurrency), asyncio.Event()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=protocol.CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        for address, problem in lost.items():
            self._lose(self._replicas[address], problem)
        self._keep(self._watch())

    async def _shut(self) -> None:
        ending = [*self._tasks, *self._keepers]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._session.close()

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._keepers.add(task)
        task.add_done_callback(self._keepers.discard)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _begin(self, session: str, model: str, content: bytes, done: Done) -> None:
        task = self._loop.create_task(self._turn(session, model, content, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _turn(self, session: str, model: str, content: bytes, done: Done) -> None:
        async with self._room:
            result: Completion | TraceError
            try:
                result = await self._answered(session, model, content)
            except TraceError as problem:
                result = problem
            except Exception as problem:  # else the turn would be waited for without end
                logger.exception("a turn was lost")
                result = PolicyError(f"a turn was lost ({type(problem).__name__}: {problem}); look at the log")
        done(result)

    async def _answered(self, session: str, model: str, content: bytes) -> Completion:
        """The answer of the first server that gives one. All are asked once, then after each of `WAITS` again, but for
        those that were silent for the longest wait: each would compute all of the turn once more."""
        problem: TraceError | None = None
        silent = set[str]()
        for wait in (*protocol.WAITS, None):
            left = set(self._replicas) - silent
            while (address := self._balance.choose(session, left)) is not None:
                left.discard(address)
                replica = self._replicas[address]
                try:
                    return await self._ask(replica, model, content)
                except ModelMissing as missing:
                    if model == replica.server.model:
                        raise
                    problem = missing  # it was started again, or somebody unloaded the name
                    self._lose(replica, missing)
                except ProviderError as failure:
                    if not failure.transient:
                        raise
                    problem = failure
                    if isinstance(failure, ServerSilent):
                        silent.add(address)
            if self._balance.used and silent.issuperset(self._balance.used):
                break
            if wait is not None:
                await self._pause(wait)
        if not self._balance.used:
            raise self._all_lost()
        assert problem is not None
        if isinstance(problem, FATAL):  # of one server: others are there, and other turns go on
            raise ProviderError(str(problem), transient=True) from problem
        if isinstance(problem, ServerFailed) and problem.status == CANNOT_SAY:
            return await self._blamed(problem, model, content)
        raise problem

    async def _blamed(self, problem: ServerFailed, model: str, content: bytes) -> Completion:
        """A turn that servers failed at, however often it was tried, asked of the base in the adapter's place and then
        once more of the adapter: `NotFinite` where that alone fails, and else what is the server's."""
        replica = self._replicas[self._balance.used[0]]
        if model == replica.server.model:
            raise problem
        one_token = {**json.loads(content), "model": replica.server.model, "max_tokens": 1}
        try:
            await self._ask(replica, replica.server.model, json.dumps(one_token).encode())
        except TraceError:
            raise problem from None
        try:
            return await self._ask(replica, model, content)
        except ServerFailed as again:
            if again.status != CANNOT_SAY:
                raise
            raise come_apart(replica.server.url, model, f"which answers for its base, and here: {again}") from again

    async def _ask(self, replica: Replica, model: str, content: bytes) -> Completion:
        """One request to one server, with what its failure says of the server."""
        server, circuit, began = replica.server, self._balance.circuits[replica.server.url], self._loop.time()
        where = f"{server.url}{COMPLETIONS}"
        if not circuit.busy:
            replica.heard, replica.looked = began, None
        circuit.busy += 1
        try:
            async with asyncio.timeout(server.seconds) as limit:
                replica.waiting.add(limit)
                try:
                    status, text = await self._post(server, content)
                finally:
                    replica.waiting.discard(limit)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as problem:
            away = server.away(str(problem))
            self._lose(replica, away)
            raise away from problem
        except (TimeoutError, aiohttp.ClientError) as problem:
            seconds = self._loop.time() - began
            # Where the server was lost meanwhile, the wait was cut short. The loop rounds what it waits.
            late = isinstance(problem, TimeoutError) and seconds > 0.99 * server.seconds
            broken = (ServerSilent if late else ProviderError)(
                f"{where} broke off after {seconds:.1f} s ({type(problem).__name__}: {problem}); look at the server's "
                "log",
                transient=True,
            )
            self._failed(replica, broken)
            raise broken from problem
        finally:
            circuit.busy -= 1
        replica.heard, replica.looked = self._loop.time(), None
        if status != 200:
            refused = server.refusal(COMPLETIONS, status, text.decode(errors="replace"))
            if isinstance(refused, ProviderError) and refused.transient and status != 429:  # that is busy, not broken
                self._failed(replica, refused)
            raise refused
        if circuit.again is None:
            self._balance.answered(server.url)
        return read_completion(server.url, model, read_document(where, text))

    async def _post(self, server: VllmServer, content: bytes) -> tuple[int, bytes]:
        headers = {"content-type": "application/json", **server.headers}
        address = f"{server.url}{COMPLETIONS}"
        async with self._session.post(address, data=content, headers=headers, allow_redirects=False) as response:
            return response.status, await response.read()

    def _failed(self, replica: Replica, problem: TraceError) -> None:
        """Count a failure. The last server that is used stays so: there is nobody else to ask."""
        if self._balance.failed(replica.server.url) and len(self._balance.used) > 1:
            self._lose(replica, problem)

    # --- lost servers -----------------------------------------------------------------------------------------

    def _lose(self, replica: Replica, problem: TraceError) -> None:
        """No turn goes to the server any more; those that wait on it go to others."""
        if replica.problem is not None:
            return
        replica.problem = problem
        self._balance.open(replica.server.url)
        rest = len(self._balance.used)
        logger.warning("%s; its turns go to the other %d servers until it is back", problem, rest)
        if not rest:
            self._back.clear()
        for limit in replica.waiting:
            if not limit.expired():  # else its turn is about to leave by itself, and asyncio refuses
                limit.reschedule(self._loop.time())
        self._keep(self._recover(replica))

    async def _recover(self, replica: Replica) -> None:
        for pause in itertools.chain(protocol.WAITS, itertools.repeat(PAUSE)):
            await asyncio.sleep(pause)
            looking = self._loop.run_in_executor(self._threads, self._restore, replica.quick)
            replica.restoring = asyncio.ensure_future(looking)
            try:
                await replica.restoring
            except TraceError as problem:
                if str(problem) != str(replica.problem):
                    logger.warning("%s is still left out: %s", replica.server.url, problem)
                replica.problem = problem
            except Exception as problem:  # else the server would be lost for ever
                logger.exception("%s could not be proven", replica.server.url)
                replica.problem = PolicyError(f"{replica.server.url} could not be proven: {problem}; look at the log")
            else:
                break
            finally:
                replica.restoring = None
        logger.warning("%s is used again", replica.server.url)
        replica.problem = None
        self._balance.answered(replica.server.url)
        self._back.set()

    async def _pause(self, seconds: float) -> None:
        """Wait before another try. Where all servers are lost, no longer than until one is back, and not less than
        until those that are looked at just then are proven or not."""
        if self._balance.used:
            await asyncio.sleep(seconds)
            return
        await self._wait_back([asyncio.sleep(seconds)])
        if looked := [r.restoring for r in self._replicas.values() if r.restoring is not None]:
            await self._wait_back([asyncio.wait(looked)])

    async def _wait_back(self, others: list[Any]) -> None:
        tasks = [asyncio.ensure_future(w) for w in (*others, self._back.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _all_lost(self) -> TraceError:
        """Why no server is left."""
        problems = [r.problem for r in self._replicas.values() if r.problem is not None]
        if len(problems) == 1 and isinstance(problems[0], FATAL):
            return problems[0]
        return ServerAway(f"no vLLM server is left: {'; '.join(map(str, problems))}", transient=True)

    # --- stalls -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at servers on which turns wait and that answered none for half the time, and again after the rest."""
        half = self.stall_seconds / 2
        while True:
            await asyncio.sleep(half / 4)
            now, looks = self._loop.time(), []
            for address in self._balance.used:
                replica = self._replicas[address]
                since = replica.looked[0] if replica.looked else replica.heard
                if self._balance.circuits[address].busy and now - since >= half:
                    looks.append(self._look(replica, now))
            await asyncio.gather(*looks)

    async def _look(self, replica: Replica, now: float) -> None:
        """Lose a server that does not answer at all, or that worked on nothing since the last look."""
        before = replica.looked
        said = f"{replica.server.url} answered no turn for {now - replica.heard:.1f} s"
        try:
            asking = self._loop.run_in_executor(self._threads, replica.quick.tokens_done)
            found = await asyncio.wait_for(asking, self.stall_seconds / 2)
        except (TraceError, TimeoutError) as problem:
            said = f"{said}, nor its /metrics ({str(problem) or 'no answer in time'})"
        else:
            if replica.looked is not before or replica.heard > now:  # it answered a turn meanwhile
                return
            replica.looked = (now, found)
            if found is None and not replica.silent:
                replica.silent = True
                logger.warning("%s has no /metrics: only policy.seconds ends a stall of it", replica.server.url)
            if found is None or before is None:
                return
            if found != before[1]:
                replica.heard = now  # its turns are long, but it works on them
                return
            said = f"{said} and worked on nothing"
        self._lose(replica, ProviderError(f"{said}; look at the server's log", transient=True))
