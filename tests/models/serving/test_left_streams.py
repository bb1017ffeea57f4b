"""A stream that does not come to its end is charged for what came of it, as exactly as the server behind it counts; it
is no answer, whether its client left or the server behind it failed. What no server counts is charged as well as it can
be counted here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from environments.contract import Message, Prompt
from models.policy import Generation, Request, Sampling
from models.renderer import Renderer
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.keys import Key, Keys
from models.serving.gateway.settings import GatewaySettings
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import Usage, event, parse_chat
from models.serving.upstreams.contract import Replica, Turn
from models.serving.upstreams.http import HttpTokens, HttpUpstream, _hear
from models.serving.upstreams.pool import Pool, Servers
from models.serving.upstreams.refusals import part_of
from models.serving.upstreams.rendered import RenderedUpstream
from models.serving.upstreams.stream_usage import BYTES_A_TOKEN, StreamUsage, usage_of, whole_usage
from tests.models.serving.gateway_running import KEY, Running, error, run
from tests.models.serving.gateway_servers import HandMadeFleet, serving

BODY = {"model": "refund", "messages": [{"role": "user", "content": "drip"}], "stream": True}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)


def leave(running: Running) -> None:
    """Ask for a stream, and hang up after its first word."""
    headers, address = {"authorization": f"Bearer {KEY}"}, f"{running.url}/v1/chat/completions"
    with httpx.stream("POST", address, json=BODY, headers=headers, trust_env=False, timeout=60) as answer:
        assert answer.status_code == 200
        next(line for line in answer.iter_lines() if "you " in line)
    until(lambda: running.gateway.in_flight == 0)


def tokens(running: Running) -> tuple[float, float]:
    """What the gateway has counted: read, and sampled."""
    read, sampled = (running.figure(f'trace_gateway_tokens_total{{kind="{k}"}}') for k in ("prompt", "completion"))
    return read, sampled


@pytest.mark.parametrize("counts_on", [True, False])
def test_a_client_that_leaves_a_stream_has_used_its_quota(tmp_path: Path, counts_on: bool) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{KEY}"\ntokens_per_day = 6\n')
    with run(keys=Keys(file=file)) as running:
        running.stub.counts_on = counts_on
        leave(running)
        sent = len(json.dumps(running.stub.seen[0]))
        assert tokens(running) == ((5, 1) if counts_on else (sent // BYTES_A_TOKEN, 1))
        assert running.figure("trace_gateway_answers_total") == 0, "half an answer is none"
        refused = running.chat("x")
        assert (refused.status_code, error(refused)["code"]) == (429, "quota_exceeded")


def test_a_stream_that_a_deadline_ends_is_charged_once() -> None:
    with run(deadline=0.5) as running:
        running.stub.counts_on = True
        assert running.chat("drip", stream=True).status_code == 200
        until(lambda: running.gateway.in_flight == 0)
        assert tokens(running) == (5, 1)


@pytest.mark.parametrize("counts_on", [True, False])
@pytest.mark.parametrize(
    ("asked", "sums", "on_the_way"),
    [
        ({}, 0, False),
        ({"include_usage": True}, 1, False),
        ({"include_usage": True, "continuous_usage_stats": True}, 1, True),
    ],
)
def test_a_client_sees_the_counts_that_it_asked_for(
    counts_on: bool, asked: dict[str, bool], sums: int, on_the_way: bool
) -> None:
    with run() as running:
        running.stub.counts_on = counts_on
        answer = running.chat("x", stream=True, stream_options=asked).text
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        assert sum("usage" in c for c in chunks if not c["choices"]) == sums
        assert {"usage" in c for c in chunks if c["choices"]} == {counts_on and on_the_way}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "you said x"
        assert tokens(running) == (5, 3), "the sum counts, whatever was told on the way"


class Engine:
    """A token engine that samples the same id for ever, and keeps how it was asked to."""

    context = 1000

    def __init__(self) -> None:
        self.asked: list[Sampling] = []

    async def generate(
        self, request: Request, streamed: bool = False, holders: Sequence[str] = ()
    ) -> AsyncGenerator[list[int] | Generation]:
        self.asked.append(request.sampling)
        while True:
            yield [7, 7]

    async def replicas(self) -> list[Replica]:
        return []

    async def close(self) -> None: ...


@pytest.mark.parametrize("events", [0, 1, 4])
def test_ids_that_the_gateway_renders_itself_are_charged_exactly(tiny_tokenizer: Any, events: int) -> None:
    """Also where the client was gone before the first event was read: what was sampled for it was sampled."""
    anna, renderer = Key("anna", (), tokens_per_day=10_000), Renderer(tiny_tokenizer)
    asked = parse_chat({"model": "base", "messages": [{"role": "user", "content": "Go on."}], "stream": True})

    async def left() -> Gateway:
        upstream = RenderedUpstream(Engine(), renderer)
        gateway = Gateway(GatewaySettings("shop", keys=Keys([anna])), upstream, HandMadeFleet())
        streamed = await gateway.stream(asked, "anna")
        for _ in range(events):
            await anext(streamed.events)
        await streamed.events.aclose()
        await streamed.close()
        return gateway

    gateway = asyncio.run(left())
    counted = {kind: gateway.metrics.tokens.labels(kind)._value.get() for kind in ("prompt", "completion")}
    read = len(renderer.start(Prompt(), [Message("user", "Go on.")]).ids)
    # The first event gives a role; it and the first text come of the same two ids.
    assert counted == {"prompt": read, "completion": max(2, 2 * (events - 1))}
    used = gateway.settings.keys
    used.admit(anna)
    used.spend("anna", 10_000 - read - int(counted["completion"]))
    with pytest.raises(ApiError, match="10000 tokens a day"):
        used.admit(anna)


@pytest.mark.parametrize(
    ("given", "sampled"),
    [({}, (0.3, 200)), ({"temperature": 0}, (0, 200)), ({"temperature": 1.5, "max_tokens": 3}, (1.5, 3))],
)
def test_what_a_request_does_not_say_is_as_the_release_was_proven(
    tiny_tokenizer: Any, given: dict[str, Any], sampled: tuple[float, int]
) -> None:
    engine = Engine()
    upstream = RenderedUpstream(engine, Renderer(tiny_tokenizer), longest=200, temperature=0.3)
    body = {"model": "base", "messages": [{"role": "user", "content": "Go on."}], "stream": True}

    async def ask() -> None:
        streamed = await Gateway(GatewaySettings("shop"), upstream, HandMadeFleet()).stream(
            parse_chat(body | given), ""
        )
        await anext(streamed.events)
        await streamed.events.aclose()
        await streamed.close()

    asyncio.run(ask())
    assert [(s.temperature, s.max_tokens) for s in engine.asked] == [sampled]


def part(text: str, index: int = 0, told: int | None = None, **more: Any) -> dict[str, Any]:
    usage = {} if told is None else {"usage": {"prompt_tokens": 9, "completion_tokens": told}}
    return {"choices": [{"index": index, "delta": {"content": text}, **more}], **usage}


def test_a_count_that_the_server_tells_replaces_one_made_here() -> None:
    usage = StreamUsage(400)
    assert usage.add({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}) == Usage(100, 0)
    assert usage.add(part("a")) == Usage(100, 1)
    assert usage.add({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}) == Usage(100, 2)
    assert usage.add({"choices": [{"index": 0, "text": "b"}]}) == Usage(100, 3)
    assert usage.add(part("c d", told=5)) == Usage(9, 5)
    assert usage.running
    assert usage.add({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}}) == Usage(9, 6)


def test_a_count_of_one_choice_is_not_that_of_the_others() -> None:
    """vLLM tells on the way what each of several choices has by itself."""
    usage = StreamUsage(0)
    assert usage.add(part("a", told=3)) == Usage(9, 3)
    assert usage.add(part("b", 1, told=2)) == Usage(9, 5)
    assert usage.add(part("c", told=4)) == Usage(9, 6)


def test_a_sum_that_comes_with_the_last_part_is_no_count_on_the_way() -> None:
    usage = StreamUsage(0)
    usage.add(part("a"))
    assert usage.add(part("", told=4, finish_reason="stop")) == Usage(9, 4)
    assert not usage.running


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        ({"choices": [{"text": "after x"}]}, Usage(100, 1)),
        ({"choices": [{"message": {"role": "assistant", "content": "漢字" * 4}}] * 2, "usage": None}, Usage(100, 12)),
        ({"choices": [{"message": {"content": None, "tool_calls": [{"id": "c", "n": 7}]}}]}, Usage(100, 5)),
        ({"choices": [{"text": "after x"}], "usage": {"completion_tokens": 2}}, Usage(100, 2)),
        ({"choices": [{"text": "after x"}], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}, Usage(9, 2)),
    ],
)
def test_a_whole_answer_that_a_server_does_not_count_costs_its_bytes(answer: dict[str, Any], counted: Usage) -> None:
    assert whole_usage(answer, 400) == counted


def test_an_answer_without_a_count_uses_the_quota(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{KEY}"\ntokens_per_day = 8\n')
    body = {"model": "stub-base", "prompt": "word " * 200}
    with run(keys=Keys(file=file)) as running:
        assert [running.post(body, "/v1/completions").status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("odd", [-5, "many", 1.5, None, [3], {"a": 1}])
def test_what_is_no_number_of_tokens_is_not_counted(odd: Any) -> None:
    """It would end the request in an error, or give a quota back."""
    assert usage_of({"usage": {"prompt_tokens": odd, "completion_tokens": 4}}) == Usage(0, 4)
    assert usage_of({"usage": {"prompt_tokens": 7, "completion_tokens": odd}}) == Usage(7, 0)
    assert usage_of({"usage": odd and [odd]}) is None
    usage = StreamUsage(400)
    assert usage.add({"choices": [], "usage": {"prompt_tokens": odd, "completion_tokens": 6}}) == Usage(100, 6)


class Log:
    """Keeps what would be stored."""

    def __init__(self) -> None:
        self.turns: list[Any] = []
        self.wants, self.add, self.close = (lambda _: True), self.turns.append, lambda: None


def failing(parts: int, fails: bool) -> Starlette:
    """A server whose answers break after so many parts: with an error, as vLLM tells it, or without a word."""

    async def answer(request: HttpRequest) -> Response:
        body = await request.json()

        async def events() -> AsyncIterator[bytes]:
            for _ in range(parts):
                choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [5], "finish_reason": None}
                yield event({"model": body["model"], "choices": [choice]})
            if fails:
                yield event({"error": {"message": "EngineCore died in /secret/path", "code": 500}})
                yield event("[DONE]")

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route(f"/v1/{p}", answer, methods=["POST"]) for p in ("chat/completions", "completions")])


@pytest.mark.parametrize("rendered", [True, False])
@pytest.mark.parametrize(("parts", "fails"), [(0, True), (2, True), (0, False), (2, False)])
def test_an_answer_that_a_server_breaks_off_is_none(
    tiny_tokenizer: Any, rendered: bool, parts: int, fails: bool
) -> None:
    asked, log = parse_chat({"model": "base", "messages": [{"role": "user", "content": "x"}], "stream": True}), Log()

    async def heard(url: str) -> tuple[Gateway, list[bytes]]:
        pool = Pool(Servers([url]))
        tokens = RenderedUpstream(HttpTokens(pool, "base", 1000, frozenset({1})), Renderer(tiny_tokenizer))
        upstream = tokens if rendered else HttpUpstream(pool, "base")
        gateway = Gateway(GatewaySettings("shop"), upstream, HandMadeFleet(), log=log)  # type: ignore[arg-type]
        try:
            if not parts:
                with pytest.raises(ApiError) as refused:
                    await gateway.stream(asked, "")
                return gateway, [event(refused.value.body)]
            streamed = await gateway.stream(asked, "")
            said = [part async for part in streamed.events]
            await streamed.close()
            return gateway, said
        finally:
            await pool.close()

    with serving(failing(parts, fails)) as url:
        gateway, said = asyncio.run(heard(url))
    told = json.loads(said[-1].removeprefix(b"data: "))["error"]["message"]
    assert told == f"the server behind the gateway {'failed' if fails else 'broke off its answer'}; ask again"
    assert b"/secret" not in b"".join(said)
    assert b"[DONE]" not in b"".join(said)
    assert (log.turns, gateway.metrics.share.total()) == ([], 0), "neither stored nor counted"


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_a_server_says_it_could_not_finish_is_none(streamed: bool) -> None:
    """As vLLM says "abort" when it is stopped, or puts its requests away: the text before it is no whole answer."""
    asked = parse_chat({"model": "base", "messages": [{"role": "user", "content": "x"}], "stream": streamed})

    async def answer(request: HttpRequest) -> Response:
        said = {"role": "assistant", "content": "Ref"}
        whole = {"model": "base", "choices": [{"index": 0, "message": said, "finish_reason": "abort"}]}
        parts = [{"model": "base", "choices": [{"index": 0, "delta": said, "finish_reason": None}]}]
        parts += [{"model": "base", "choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}]
        return Response(b"".join(map(event, [*parts, "[DONE]"])) if streamed else json.dumps(whole).encode())

    async def heard(url: str) -> bytes:
        turn, upstream, said = Turn(asked, None, "base", "c"), HttpUpstream(Pool(Servers([url])), "base"), list[bytes]()

        async def ask() -> None:
            if streamed:
                async for part in upstream.stream(turn):
                    said.append(part)
            else:
                await upstream.answer(turn)

        with pytest.raises(ApiError, match="broke off its answer") as refused:
            await ask()
        await upstream.close()
        assert refused.value.status == 502
        return b"".join(said)

    with serving(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as url:
        said = asyncio.run(heard(url))
    assert (b"Ref" in said, b"[DONE]" in said) == (streamed, False), "what came before it is the client's"


def test_an_error_in_the_place_of_a_whole_answer_is_told_as_one() -> None:
    with pytest.raises(ApiError, match="the server behind the gateway failed") as refused:
        part_of(b'{"error": {"message": "died in /secret/path", "code": "engine_dead"}}')
    assert refused.value.status == 502


def test_a_client_that_hangs_up_at_the_last_event_has_a_whole_answer() -> None:
    """As OpenAI's does, while the server behind is still ending its response."""
    headers, body = {"authorization": f"Bearer {KEY}"}, {**BODY, "messages": [{"role": "user", "content": "x"}]}
    with run() as running:
        running.gateway.log = log = Log()  # type: ignore[assignment]
        running.stub.lingers = 0.2
        address = f"{running.url}/v1/chat/completions"
        with httpx.stream("POST", address, json=body, headers=headers, trust_env=False, timeout=60) as answer:
            next(line for line in answer.iter_lines() if "[DONE]" in line)
        until(lambda: running.gateway.in_flight == 0)
        assert (len(log.turns), running.figure("trace_gateway_cancelled_total")) == (1, 0)


def test_of_several_answers_in_one_stream_the_first_is_heard() -> None:
    """As of those that come whole: it is what is stored, and what the next turn is known by."""
    turn = Turn(
        parse_chat({"model": "base", "messages": [{"role": "user", "content": "x"}], "n": 2}), None, "base", "c"
    )
    for index, word in ((1, "No"), (0, "Yes"), (1, ", not allowed."), (0, ", refunded.")):
        _hear(turn, {"choices": [{"index": index, "delta": {"content": word}}]})
    for index, reason in ((0, "stop"), (1, "length")):
        _hear(turn, {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})
    assert (turn.heard.message["content"], turn.heard.finish) == ("Yes, refunded.", "stop")
