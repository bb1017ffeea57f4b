"""Connections to OpenAI-compatible servers behind the gateway: several replicas of the same models, over aiohttp.

With httpx, four fifths of a request's processor time went into its client (`benchmarks/serving.py` has both).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import aiohttp

from errors import ConfigurationError, TraceError
from models.serving.openai_api.errors import ApiError
from models.serving.upstreams.contract import DEADLINE, HoldersAway, Replica
from models.serving.upstreams.refusals import BROKEN_OFF
from models.vllm.balance import Balance
from models.vllm.server import address_of

logger = logging.getLogger("trace.models")
CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 2.0
# Shorter than the five seconds after which uvicorn, and so vLLM's server, closes an idle connection: a
# request on one that is being closed fails.
IDLE_SECONDS = 2.0
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Servers:
    """Addresses (with or without `/v1`, and a login), and the key that the servers ask for."""

    urls: Sequence[str]
    key: str = ""

    @property
    def headers(self) -> dict[str, dict[str, str]]:
        """What each is asked with, by its address as it may be told."""
        if not self.urls:
            raise ConfigurationError("no server is given; name at least one")
        return dict(address_of(url, self.key) for url in self.urls)


class Pool:
    """Connections to replicas; a conversation keeps to one while it answers (`Balance`). Used on one event loop, but
    for two sets of addresses, since who answers there may have another base. Those in `held` get no request, whether
    they answer or not. Those in `unproven` were lost: before the next request each is asked, by `prove` in a thread,
    whether it is the one that is wanted; it raises `TraceError` where not, or not yet (None: nobody asks)."""

    prove: Callable[[str], object] | None = None

    def __init__(self, servers: Servers) -> None:
        self._headers, self.retries = servers.headers, 0
        self.addresses = tuple(self._headers)
        self._opened: aiohttp.ClientSession | None = None
        self.balance, self.held, self.unproven = Balance(self.addresses), set[str](), set[str]()
        self._proving: dict[str, asyncio.Future[bool]] = {}
        self._said = dict[str, str]()
        # When each last gave somebody an answer, or a part of one: servers that hang may still begin answers.
        self._heard = dict.fromkeys(self.addresses, float("-inf"))

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Opened at the first request: it belongs to the event loop that runs then."""
        if self._opened is None:
            # The gateway's deadline ends what takes too long; here only connecting has a limit. Proxies are not asked,
            # cookies not kept.
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._opened

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, body: bytes, holders: Sequence[str] = (), conversation: str = ""
    ) -> AsyncGenerator[tuple[str, aiohttp.ClientResponse]]:
        """The response to a request, its body still to be read, and who gave it. `holders` are the replicas that may be
        asked (all when empty). One that cannot be reached is asked again after a pause, and sooner only where all are
        like that; so is one that fails, or hangs until the time is up, several times in a row. Raises `ApiError`, and
        `HoldersAway` where others than those are left."""
        asked = {h.rstrip("/").removesuffix("/v1") for h in holders}
        left = [a for a in self.addresses if a in asked] or [a for a in self.addresses if a not in self.held]
        while left:
            circuits = self.balance.circuits
            address = self.balance.choose(conversation, left, trials=True) or min(left, key=lambda a: circuits[a].busy)
            left.remove(address)
            circuit, began = circuits[address], time.monotonic()
            opened = circuit.opened
            circuit.busy += 1
            try:
                try:
                    if address in self.unproven and not await self._proven(address):
                        self.balance.open(address, opened)
                        continue
                    response = await self._session.post(
                        f"{address}{path}", data=body, headers=JSON | self._headers[address], allow_redirects=False
                    )
                except aiohttp.ClientConnectionError:
                    self.lose(address)
                    self.balance.open(address, opened)
                    self.retries += bool(left)
                    continue
                except aiohttp.ClientError:
                    raise ApiError(502, "the server behind the gateway answered something that is not HTTP") from None
                except asyncio.CancelledError:
                    self._given_up(address, began, opened)
                    raise
                if response.status >= 500 and self.balance.failed(address):
                    self.balance.open(address, opened)
                try:
                    yield address, response
                except aiohttp.ClientError:
                    self.lose(address)
                    raise ApiError(502, BROKEN_OFF) from None
                except asyncio.CancelledError:
                    # An answer that has begun goes on bit by bit: it hangs when the latter half of its time had none.
                    self._given_up(address, (began + time.monotonic()) / 2, opened)
                    raise
                finally:
                    if response.content.at_eof():
                        self._heard[address] = time.monotonic()
                    # Also where the reader had enough, or left, while it went on.
                    if response.status < 500 and self._heard[address] > (began + time.monotonic()) / 2:
                        self.balance.answered(address)
                    # Closes the connection of an answer that was not read to its end: the server stops working on it.
                    response.release()
                return
            finally:
                circuit.busy -= 1
        if asked.intersection(self.addresses) and not asked.union(self.held).issuperset(self.addresses):
            raise HoldersAway
        raise ApiError(503, "no server behind the gateway answers; ask again later")

    def lose(self, address: str) -> None:
        """Nobody was at an address, or a server broke off: who answers there next may be another."""
        if self.prove is not None:
            self.unproven.add(address)

    async def _proven(self, address: str) -> bool:
        """Whether a server that was lost is the one that is wanted. Requests that wait for this share one look."""
        looking = self._proving.get(address)
        if looking is None:
            looking = self._proving[address] = asyncio.ensure_future(asyncio.to_thread(self._prove, address))
            looking.add_done_callback(lambda _: self._proving.pop(address))
        return await asyncio.shield(looking)

    def _prove(self, address: str) -> bool:
        try:
            if self.prove is not None:
                self.prove(address)
        except TraceError as problem:
            if self._said.get(address) != str(problem):
                logger.warning("%s gets no request: %s", address, problem)
            self._said[address] = str(problem)
            return False
        self._said.pop(address, None)
        self.unproven.discard(address)
        return True

    def _given_up(self, address: str, since: float, opened: int) -> None:
        """A wait for a server was cancelled: it has failed where time was up and nobody has heard of it `since`. One
        that went on with others' answers is at work, and what was asked here takes longer. `opened`: `Balance.open`."""
        limit = DEADLINE.get()
        late = limit is not None and limit.expired()
        if late and self._heard[address] <= since and self.balance.failed(address):
            self.balance.open(address, opened)

    async def parts(self, address: str, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        """A streamed body as it comes."""
        async for part in response.content.iter_any():
            self._heard[address] = time.monotonic()
            yield part

    async def replicas(self) -> list[Replica]:
        """Every replica, asked now."""
        return list(await asyncio.gather(*map(self._look, self.addresses)))

    async def _look(self, address: str) -> Replica:
        if address in self.held:
            return Replica(address, False, "not seen with the right base yet")
        try:
            limit = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            headers, where = self._headers[address], f"{address}/health"
            async with self._session.get(where, headers=headers, timeout=limit, allow_redirects=False) as answer:
                return Replica(address, answer.status == 200, "" if answer.status == 200 else f"{answer.status}")
        except (aiohttp.ClientError, TimeoutError) as problem:
            return Replica(address, False, type(problem).__name__)

    async def close(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            await self._opened.close()
