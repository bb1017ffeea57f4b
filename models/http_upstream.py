"""OpenAI-compatible servers behind the gateway: several replicas of the same models, over plain httpx.

`HttpUpstream` passes a request on as it came, with the model's name replaced: the server's own chat template and tool
parser apply. For adapters trained on this project's rendering, `HttpTokens` is the engine of `LocalUpstream` instead:
the gateway renders, the server completes token ids (vLLM's `return_token_ids`), and the gateway reads the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from environments.contract import canonical_json
from errors import ConfigurationError
from models.chat_api import ROLES, Usage
from models.gateway_errors import KINDS, ApiError, too_long
from models.policy import Generation, Request
from models.upstream import AdapterGone, Replica, Turn

CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 2.0
# Shorter than the five seconds after which uvicorn, and so vLLM's server, closes a connection that nobody uses: a
# request on one that is being closed fails.
IDLE_SECONDS = 2.0
LONGEST_MESSAGE = 500


@dataclass(frozen=True)
class Servers:
    """Addresses (with or without `/v1`), and the key that the servers ask for."""

    urls: Sequence[str]
    key: str = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Without `/v1`."""
        if not self.urls:
            raise ConfigurationError("no server is given; name at least one")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in self.urls)


class Pool:
    """Connections to replicas; a request goes to the one with the fewest in flight."""

    def __init__(self, servers: Servers) -> None:
        self.addresses, self.retries = servers.addresses, 0
        headers = {"authorization": f"Bearer {servers.key}"} if servers.key else {}
        # The gateway's deadline ends what takes too long; here only connecting has a limit. Proxies are not asked.
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_SECONDS),
            trust_env=False,
        )
        self._busy: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, body: bytes, holders: Sequence[str] = ()
    ) -> AsyncGenerator[tuple[str, httpx.Response]]:
        """The response to a request, its body still to be read, and who gave it. `holders` are the replicas that may be
        asked (all when empty). A replica that cannot be reached is left out for this request. Raises `ApiError`."""
        known = [a for a in self.addresses if not holders or a in {h.rstrip("/").removesuffix("/v1") for h in holders}]
        left = known or list(self.addresses)
        while left:
            address = min(left, key=lambda a: self._busy[a])
            left.remove(address)
            self._busy[address] += 1
            try:
                request = self._client.build_request(
                    "POST", f"{address}{path}", content=body, headers={"content-type": "application/json"}
                )
                try:
                    response = await self._client.send(request, stream=True)
                except (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError):
                    self.retries += bool(left)
                    continue
                try:
                    yield address, response
                except (httpx.TransportError, httpx.StreamError):
                    raise ApiError(502, "the server behind the gateway broke off its answer; ask again") from None
                finally:
                    await response.aclose()
                return
            finally:
                self._busy[address] -= 1
        raise ApiError(503, "no server behind the gateway answers; ask again later")

    async def replicas(self) -> list[Replica]:
        """Every replica, asked now."""
        return list(await asyncio.gather(*map(self._look, self.addresses)))

    async def _look(self, address: str) -> Replica:
        try:
            answer = await self._client.get(f"{address}/health", timeout=HEALTH_SECONDS)
        except httpx.HTTPError as problem:
            return Replica(address, False, type(problem).__name__)
        return Replica(address, answer.status_code == 200, "" if answer.status_code == 200 else f"{answer.status_code}")

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


class HttpUpstream:
    """Passes requests on. `base` is the name that the servers give their base model."""

    def __init__(self, pool: Pool, base: str) -> None:
        self.pool, self.base = pool, base

    async def answer(self, turn: Turn) -> dict[str, Any]:
        """The body of the server's answer. Raises `ApiError` (502) if somebody else answered than was asked."""
        path, content, holders = self._request(turn)
        async with self.pool.post(path, content, holders) as (address, response):
            raw = await response.aread()
            if response.status_code != 200:
                raise _problem(response.status_code, raw, turn, address)
        body = _json(raw)
        self._check(body, turn)
        usage = body.get("usage") or {}
        choice = (body.get("choices") or [{}])[0]
        turn.heard.message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        turn.heard.finish = str(choice.get("finish_reason"))
        turn.heard.usage = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
        return body | {"model": turn.name}

    async def stream(self, turn: Turn) -> AsyncGenerator[bytes]:
        """The server's events as they are; they are read only when somebody listens."""
        path, content, holders = self._request(turn)
        async with self.pool.post(path, content, holders) as (address, response):
            if response.status_code != 200:
                raise _problem(response.status_code, await response.aread(), turn, address)
            first = True
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data != "[DONE]" and (first or turn.listen):
                    chunk = _json(data.encode())
                    if first:
                        self._check(chunk, turn)
                    _hear(turn, chunk)
                    first = False
                yield f"data: {data}\n\n".encode()

    async def replicas(self) -> list[Replica]:
        return await self.pool.replicas()

    async def close(self) -> None:
        await self.pool.close()

    def _name(self, turn: Turn) -> str:
        return turn.adapter.name if turn.adapter else self.base

    def _check(self, body: Mapping[str, Any], turn: Turn) -> None:
        if "error" not in body and body.get("model") != self._name(turn):
            raise ApiError(502, f"the server answered as {body.get('model')!r:.80}, asked was {self._name(turn)!r}")

    def _request(self, turn: Turn) -> tuple[str, bytes, Sequence[str]]:
        body = dict(turn.asked.body) | {"model": self._name(turn)}
        if turn.asked.chat and turn.preset:
            ahead = [{"role": "system", "content": turn.preset.instructions}]
            body["messages"] = [*ahead, *map(_as_openai, turn.preset.examples), *turn.asked.messages]
            body["tools"] = list(turn.preset.tools)
        path = "/v1/chat/completions" if turn.asked.chat else "/v1/completions"
        return path, json.dumps(body, ensure_ascii=False).encode(), turn.adapter.replicas if turn.adapter else ()


class HttpTokens:
    """A token engine on vLLM servers: what `LocalEngine` is to the model in this process."""

    def __init__(self, pool: Pool, base: str, context: int, stop_ids: frozenset[int]) -> None:
        self.pool, self.base, self.context, self.stop_ids = pool, base, context, sorted(stop_ids)

    async def generate(
        self, request: Request, streamed: bool = False, holders: Sequence[str] = ()
    ) -> AsyncGenerator[list[int] | Generation]:
        """New ids as they come, and at last the whole `Generation` (without log-probabilities)."""
        body = {
            "model": request.adapter or self.base,
            "prompt": list(request.prompt),
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "seed": request.sampling.seed % 2**31,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "stop_token_ids": self.stop_ids,
            "stream": streamed,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        ids, finish = list[int](), "length"
        async with self.pool.post("/v1/completions", canonical_json(body).encode(), holders) as (address, response):
            if response.status_code != 200:
                raw = await response.aread()
                if response.status_code == 404 and request.adapter:
                    raise AdapterGone(address)
                raise _refusal(response.status_code, raw)
            async for chunk in _chunks(response, streamed):
                for choice in chunk.get("choices") or ():
                    fresh = [int(i) for i in choice.get("token_ids") or ()]
                    finish = choice.get("finish_reason") or finish
                    ids += fresh
                    if streamed and fresh:
                        yield fresh
        yield Generation(request.session, tuple(ids), (), "stop" if finish == "stop" else "length")

    async def replicas(self) -> list[Replica]:
        return await self.pool.replicas()

    async def close(self) -> None:
        await self.pool.close()


async def _chunks(response: httpx.Response, streamed: bool) -> AsyncGenerator[dict[str, Any]]:
    """The parts of a server's answer; one when it was not streamed."""
    if not streamed:
        yield _json(await response.aread())
        return
    async for line in response.aiter_lines():
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            yield _json(line[5:].strip().encode())


def _hear(turn: Turn, chunk: Mapping[str, Any]) -> None:
    """Add a part of a streamed answer to what was heard."""
    heard, usage = turn.heard, chunk.get("usage")
    if usage:
        heard.usage = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    message = heard.message
    message.setdefault("role", "assistant")
    for choice in chunk.get("choices") or ():
        heard.finish = choice.get("finish_reason") or heard.finish
        delta = choice.get("delta") or {"content": choice.get("text")}
        if delta.get("content"):
            message["content"] = (message.get("content") or "") + delta["content"]
        for part in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            while len(calls) <= part.get("index", 0):
                calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call, function = calls[part.get("index", 0)], part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""


def _as_openai(message: Any) -> dict[str, Any]:
    """A worked example as a server takes it."""
    one: dict[str, Any] = {"role": ROLES[message.role], "content": message.content}
    if message.tool_calls:
        one["tool_calls"] = [
            {
                "id": c.id or f"call_{i}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))},
            }
            for i, c in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        one["tool_call_id"] = message.tool_call_id or "call_0"
    return one


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        raise ApiError(502, "the server behind the gateway answered something that is not JSON") from None
    if not isinstance(body, dict):
        raise ApiError(502, "the server behind the gateway answered something that is no answer")
    return body


def _problem(status: int, raw: bytes, turn: Turn, address: str) -> Exception:
    """What a client is told of a server's refusal. The server's own words are passed on only where the client's
    request is at fault: others may tell of machines and paths."""
    if status == 404 and turn.adapter is not None:
        return AdapterGone(address)
    return _refusal(status, raw)


def _refusal(status: int, raw: bytes) -> Exception:
    try:
        said = json.loads(raw)
        error = said.get("error") or said
        message = str(error.get("message") or "")[:LONGEST_MESSAGE]
    except (ValueError, AttributeError):
        message = ""
    if status == 400 and "context" in message and "length" in message:
        return too_long(message)
    if status in (400, 413, 422):
        return ApiError(400, message or "the server behind the gateway refused the request")
    if status == 429:
        return ApiError(429, "the servers behind the gateway are busy; ask again")
    return ApiError(
        status if status in KINDS and status >= 500 else 502, "the server behind the gateway failed; ask again"
    )
