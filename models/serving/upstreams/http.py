"""OpenAI-compatible servers behind the gateway: what they are asked, and what is read of their answers.

`HttpUpstream` passes a request on as it came, with the model's name replaced: the server's own chat template and tool
parser apply. For adapters trained on this project's rendering, `HttpTokens` is the engine of `RenderedUpstream`: the
gateway renders, the server completes token ids (vLLM's `return_token_ids`), and the gateway reads the calls.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any

from environments.contract import Prompt, canonical_json
from models.policy import Generation, Request
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import DONE, ROLES
from models.serving.upstreams.contract import AdapterGone, Replica, Turn
from models.serving.upstreams.pool import Pool
from models.serving.upstreams.refusals import BROKEN_OFF, check_model, part_of, problem_of, refusal_of
from models.serving.upstreams.stream_usage import StreamUsage, whole_usage
from models.vllm.server import body_of

# Reasons with which vLLM ends an answer that it could not finish.
UNFINISHED = ("abort", "error")


class HttpUpstream:
    """Passes requests on. `base` is the name that the servers give their base model. How long an answer is whose
    request names no limit is the servers' to say."""

    longest = 0

    def __init__(self, pool: Pool, base: str) -> None:
        self.pool, self.base = pool, base

    async def answer(self, turn: Turn) -> dict[str, Any]:
        """The body of the server's answer. Raises `ApiError` (502) if another model answered than was asked."""
        path, content, holders = self._request(turn)
        async with self.pool.post(path, content, holders, turn.conversation) as (address, response):
            raw = await response.read()
            if response.status != 200:
                raise problem_of(response.status, raw, turn, address)
        body = _answer_in(raw)
        check_model(body, self._name(turn))
        choice = (body.get("choices") or [{}])[0]
        turn.heard.message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        turn.heard.finish = str(choice.get("finish_reason"))
        turn.heard.usage = whole_usage(body, len(content))
        return body | {"model": turn.name}

    async def stream(self, turn: Turn) -> AsyncGenerator[bytes]:
        """The server's events as they are, but for its counts of tokens where the client did not ask for them. What has
        come of the answer is counted with every part: a client may leave after any. Raises `ApiError` when the server
        fails on the way, or ends without having finished."""
        path, content, holders = self._request(turn)
        async with self.pool.post(path, content, holders, turn.conversation) as (address, response):
            if response.status != 200:
                raise problem_of(response.status, await response.read(), turn, address)
            first, finished, done, usage = True, False, False, StreamUsage(len(content))
            async for events in _events(self.pool.parts(address, response)):
                passed = list[bytes]()
                for data in events:
                    if data == b"[DONE]":
                        done = True
                        continue
                    try:
                        chunk = _answer_in(data)
                    except ApiError:
                        if passed:  # what came before it is the client's
                            yield _joined(passed)
                        raise
                    if first:
                        check_model(chunk, self._name(turn))
                        first = False
                    finished = finished or any(c.get("finish_reason") for c in chunk.get("choices") or ())
                    turn.heard.usage = usage.add(chunk)
                    if turn.listen:
                        _hear(turn, chunk)
                    if (shown := _shown(data, chunk, turn, usage.running)) is not None:
                        passed.append(shown)
                if passed:
                    yield _joined(passed)
        if not finished and not done:
            raise ApiError(502, BROKEN_OFF)
        # Not before the server has ended, too: clients hang up at this, and an answer that came whole would be left.
        if done:
            yield DONE

    def ahead(self, prompt: Prompt) -> int:
        """A token for every four bytes of the prompt: no tokenizer is needed here."""
        given = [*_ahead(prompt), *prompt.tools]
        return len(json.dumps(given, ensure_ascii=False).encode()) // 4

    async def replicas(self) -> list[Replica]:
        return await self.pool.replicas()

    async def close(self) -> None:
        await self.pool.close()

    def _name(self, turn: Turn) -> str:
        return turn.adapter.name if turn.adapter else self.base

    def _request(self, turn: Turn) -> tuple[str, bytes, Sequence[str]]:
        body = dict(turn.asked.body) | {"model": self._name(turn)}
        if turn.asked.chat and turn.prompt:
            body["messages"] = [*_ahead(turn.prompt), *turn.asked.messages]
            if turn.prompt.tools:  # servers refuse a list that is empty
                body["tools"] = list(turn.prompt.tools)
        if turn.asked.stream:  # a server counts the tokens of a stream only when asked, and quotas need the count
            counts = {"include_usage": True, "continuous_usage_stats": True}
            body["stream_options"] = {**(body.get("stream_options") or {}), **counts}
        path = "/v1/chat/completions" if turn.asked.chat else "/v1/completions"
        return path, json.dumps(body, ensure_ascii=False).encode(), turn.adapter.replicas if turn.adapter else ()


class HttpTokens:
    """A token engine on vLLM servers: what `LocalEngine` is to the model in this process."""

    def __init__(self, pool: Pool, base: str, context: int, stop_ids: frozenset[int]) -> None:
        self.pool, self.base, self.context, self.stop_ids = pool, base, context, stop_ids

    async def generate(
        self, request: Request, streamed: bool = False, holders: Sequence[str] = ()
    ) -> AsyncGenerator[list[int] | Generation]:
        """New ids as they come, and at last the whole `Generation` (without log-probabilities). Raises `ApiError` when
        the server fails on the way, ends without having finished, answers as another model or gives no token ids."""
        model = request.adapter or self.base
        body = body_of(request, model, self.stop_ids) | {"seed": request.sampling.seed % 2**31, "stream": streamed}
        body |= {"return_token_ids": True, "add_special_tokens": False}
        ids, finish = list[int](), ""
        content = canonical_json(body).encode()
        async with self.pool.post("/v1/completions", content, holders, request.session) as (address, response):
            if response.status != 200:
                raw = await response.read()
                if response.status == 404 and request.adapter:
                    raise AdapterGone(address)
                raise refusal_of(response.status, raw)
            async for chunk in _chunks(self.pool.parts(address, response), streamed):
                check_model(chunk, model)
                for choice in chunk.get("choices") or ():
                    fresh = [int(i) for i in choice.get("token_ids") or ()]
                    finish = choice.get("finish_reason") or finish
                    ids += fresh
                    if streamed and fresh:
                        yield fresh
        if not finish or finish in UNFINISHED:
            raise ApiError(502, BROKEN_OFF)
        if not ids:  # at least the one that ends a turn was sampled
            raise ApiError(502, "the server behind the gateway gives no token ids")
        yield Generation(request.session, tuple(ids), (), "stop" if finish == "stop" else "length")

    async def replicas(self) -> list[Replica]:
        return await self.pool.replicas()

    async def close(self) -> None:
        await self.pool.close()


async def _events(parts: AsyncIterable[bytes]) -> AsyncGenerator[list[bytes]]:
    """The data of a streamed answer's events, those that came together in one list. Lines have any length: aiohttp's
    own reader of lines has a limit."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if events := [line[5:].strip() for line in lines if line.startswith(b"data:")]:
            yield events
    if rest.startswith(b"data:"):
        yield [rest[5:].strip()]


async def _chunks(parts: AsyncIterable[bytes], streamed: bool) -> AsyncGenerator[dict[str, Any]]:
    """The parts of a server's answer; one when it was not streamed."""
    if not streamed:
        yield part_of(b"".join([part async for part in parts]))
        return
    async for events in _events(parts):
        for data in events:
            if data != b"[DONE]":
                yield part_of(data)


def _answer_in(raw: bytes) -> dict[str, Any]:
    """An answer, or a part of one. Raises `ApiError` also where the server says that it could not finish it."""
    body = part_of(raw)
    if any(choice.get("finish_reason") in UNFINISHED for choice in body.get("choices") or ()):
        raise ApiError(502, BROKEN_OFF)
    return body


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"data: %b\n\n" % data for data in parts)


def _shown(data: bytes, chunk: Mapping[str, Any], turn: Turn, running: bool) -> bytes | None:
    """A part of a streamed answer as the client sees it, None for one that it does not; `data` is the part as it came.
    Who asked for a count sees the sum, and counts on the way to it (`running`) only if it asked for those, too: a
    client may add up whatever it sees."""
    if not chunk.get("usage"):
        return data
    asked, only_usage = turn.asked, not chunk.get("choices")
    on_the_way = running and not only_usage and not asked.usage_in_parts
    if asked.usage_in_stream and not on_the_way:
        return data
    return None if only_usage else json.dumps({k: v for k, v in chunk.items() if k != "usage"}).encode()


def _hear(turn: Turn, chunk: Mapping[str, Any]) -> None:
    """Add a part of a streamed answer to what was heard."""
    heard, message = turn.heard, turn.heard.message
    message.setdefault("role", "assistant")
    for choice in chunk.get("choices") or ():
        if choice.get("index"):  # another answer to the same request (`n`): the first is heard, as where it comes whole
            continue
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


def _ahead(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages that stand before a request's own."""
    return [{"role": "system", "content": prompt.instructions}, *map(_as_openai, prompt.examples)]


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
