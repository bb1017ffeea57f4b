"""The gateway's connections to several servers: a conversation keeps to one, and a dead one is not asked every time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from models.policy import Generation, PolicyIdentity, Request, Sampling
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import event, parse_chat
from models.serving.upstreams.http import HttpTokens, HttpUpstream
from models.serving.upstreams.pool import Pool, Servers
from models.vllm.balance import FAILURES, FIRST_PAUSE, Balance
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from tests.models.serving.gateway_servers import HandMadeFleet, Stub, serving
from tests.models.vllm_backend.vllm_stub import vllm_stub

NOBODY = "http://127.0.0.1:9"
BODY = b'{"model": "base", "prompt": [1], "max_tokens": 1, "return_token_ids": true}'


async def asked(pool: Pool, conversations: Sequence[str]) -> list[str]:
    """Who answers each, one after the other."""
    found = []
    for conversation in conversations:
        async with pool.post("/v1/completions", BODY, (), conversation) as (address, response):
            await response.read()
            found.append(address)
    return found


def test_a_conversation_keeps_to_its_server_and_others_use_all() -> None:
    async def all_of_it(urls: list[str]) -> None:
        pool = Pool(Servers(urls))
        # A hash of name and port decides; of twelve names one run in 2,048 sent all to one server.
        names = [f"c{i}" for i in range(60)]
        first = await asked(pool, names)
        assert set(first) == set(urls)
        assert await asked(pool, names) == first
        await pool.close()

    with vllm_stub() as one, vllm_stub() as two:
        asyncio.run(all_of_it([one.url, two.url]))


def test_a_server_that_nobody_answers_at_is_tried_once_a_pause_and_used_when_it_is_the_only_one() -> None:
    async def all_of_it(url: str) -> None:
        pool, now = Pool(Servers([NOBODY, url])), [100.0]
        pool.balance = Balance(pool.addresses, lambda: now[0])
        names = [f"c{i}" for i in range(12)]
        assert Counter(await asked(pool, names)) == {url: 12}
        assert pool.retries == 1
        now[0] += 1.0
        await asked(pool, names)
        assert pool.retries == 2
        await pool.close()
        alone = Pool(Servers([NOBODY]))
        for _ in range(2):
            with pytest.raises(ApiError, match="no server behind the gateway answers"):
                await asked(alone, ["c"])
        await alone.close()

    with vllm_stub() as stub:
        asyncio.run(all_of_it(stub.url))


def test_requests_that_fail_together_make_no_pause_longer() -> None:
    """Each connection that broke with the others doubled it: half a minute for one that was back after a second."""

    async def all_of_it() -> None:
        broken = asyncio.Event()

        async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            await broken.wait()
            writer.close()

        async def ask() -> None:
            with pytest.raises(ApiError, match="no server behind the gateway answers"):
                await asked(pool, ["c"])

        async with await asyncio.start_server(drop, "127.0.0.1", 0) as server:
            pool, now = Pool(Servers([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"])), [100.0]
            pool.balance = Balance(pool.addresses, lambda: now[0])
            (circuit,) = pool.balance.circuits.values()
            asking = [asyncio.create_task(ask()) for _ in range(8)]
            while circuit.busy < 8:
                await asyncio.sleep(0.01)
            broken.set()
            await asyncio.gather(*asking)
            assert circuit.pause == FIRST_PAUSE
        for pause in (2 * FIRST_PAUSE, 4 * FIRST_PAUSE):  # nobody listens there any more
            now[0] += circuit.pause
            await ask()
            assert circuit.pause == pause
        await pool.close()

    asyncio.run(all_of_it())


def test_a_server_that_fails_three_times_in_a_row_is_left_to_the_others() -> None:
    async def all_of_it(urls: list[str]) -> list[str]:
        pool = Pool(Servers(urls))
        pool.balance = Balance(pool.addresses, lambda: 100.0)
        found = await asked(pool, [f"c{i}" for i in range(40)])
        await pool.close()
        return found

    with vllm_stub() as broken, vllm_stub() as sound:
        broken.failures = [500] * 40
        found = asyncio.run(all_of_it([broken.url, sound.url]))
        assert found.count(broken.url) == 3


@asynccontextmanager
async def hung() -> AsyncIterator[str]:
    """The address of a server that takes connections and answers nothing."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until whoever asked hangs up
        writer.close()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def before(pool: Pool, deadline: float) -> Gateway:
    """A gateway on these servers. Their clock stands still, so that a circuit that is open stays open."""
    pool.balance = Balance(pool.addresses, lambda: 100.0)
    settings = GatewaySettings("shop", base="stub-base", deadline=deadline)
    return Gateway(settings, HttpUpstream(pool, "stub-base"), HandMadeFleet())


async def status(gateway: Gateway, conversation: str) -> int:
    body = {"model": "stub-base", "messages": [{"role": "user", "content": conversation}]}
    try:
        await gateway.answer(parse_chat(body), "", conversation)
    except ApiError as problem:
        return problem.status
    return 200


def test_a_server_that_takes_requests_and_answers_none_is_left_to_the_others() -> None:
    async def all_of_it(url: str) -> list[int]:
        async with hung() as silent:
            pool = Pool(Servers([silent, url]))
            gateway = before(pool, 0.3)
            found = [await status(gateway, f"c{i}") for i in range(40)]
            await pool.close()
        return found

    with serving(Stub().app) as url:
        found = asyncio.run(all_of_it(url))
    assert Counter(found) == {504: FAILURES, 200: 40 - FAILURES}


def test_clients_that_leave_and_requests_that_only_take_long_take_no_server_out_of_use() -> None:
    async def leave(pool: Pool) -> None:
        gateway = before(pool, 30)
        for number in range(FAILURES + 1):
            asked = asyncio.create_task(status(gateway, f"c{number}"))
            while not pool.balance.circuits[pool.addresses[0]].busy:
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])

    async def all_of_it(url: str) -> None:
        async with hung() as silent:
            left, slow = Pool(Servers([silent])), Pool(Servers([url]))
            await leave(left)
            gateway = before(slow, 0.8)
            found = await asyncio.gather(*(status(gateway, "stall") for _ in range(FAILURES + 1)), status(gateway, "c"))
            assert found == [504] * (FAILURES + 1) + [200]
            for pool in (left, slow):
                assert pool.balance.used == list(pool.addresses)
                await pool.close()

    with serving(Stub().app) as url:
        asyncio.run(all_of_it(url))


@asynccontextmanager
async def streaming(events: int, seconds: float = 3600.0) -> AsyncIterator[str]:
    """The address of a server that begins every stream at once, and keeps it: so many words with nothing between, then
    one after so many seconds each."""

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
        word = f"data: {json.dumps({'model': 'stub-base', 'choices': [choice]})}\n\n".encode()
        writer.write(word * events)
        with contextlib.suppress(OSError):
            left = asyncio.ensure_future(reader.read())
            while not (await asyncio.wait([left], timeout=seconds))[0]:
                writer.write(word)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(stream, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def streamed(gateway: Gateway, conversation: str, most: int | None = None) -> str:
    """What a client sees of a stream, of which it reads so many parts (None: all)."""
    messages = [{"role": "user", "content": conversation}]
    try:
        answer = await gateway.stream(
            parse_chat({"model": "stub-base", "stream": True, "messages": messages}), "", conversation
        )
    except ApiError as problem:
        return str(problem.status)
    text = ""
    async with contextlib.aclosing(answer.events) as events:
        async for part in events:
            text += part.decode()
            most = None if most is None else most - 1
            if most == 0:
                break
    await answer.close()
    return "whole" if "[DONE]" in text else "504" if "no answer within" in text else "left"


@pytest.mark.parametrize("events", [0, 1])
def test_a_server_that_hangs_amid_its_streams_is_left_to_the_others(events: int) -> None:
    async def all_of_it(url: str) -> list[str]:
        async with streaming(events) as silent:
            pool = Pool(Servers([silent, url]))
            gateway = before(pool, 0.3)
            found = [await streamed(gateway, f"c{i}") for i in range(40)]
            await pool.close()
        return found

    with serving(Stub().app) as url:
        found = asyncio.run(all_of_it(url))
    assert Counter(found) == {"504": FAILURES, "whole": 40 - FAILURES}


def test_a_server_that_begins_streams_and_sends_nothing_opens_its_circuit_however_many_ask_it() -> None:
    """The beginnings that others see are no work."""

    async def all_of_it() -> None:
        async with streaming(0) as silent:
            pool = Pool(Servers([silent]))
            gateway, asked = before(pool, 0.4), list[asyncio.Task[str]]()
            for number in range(8):
                asked.append(asyncio.create_task(streamed(gateway, f"c{number}")))
                await asyncio.sleep(0.1)
            assert pool.balance.used == []
            assert set(await asyncio.gather(*asked)) == {"504"}
            await pool.close()

    asyncio.run(all_of_it())


def test_a_stream_of_which_its_reader_had_enough_shows_that_the_server_is_well() -> None:
    """As at a text that the client wants to stop at."""

    async def all_of_it() -> None:
        async with streaming(1) as url:
            pool = Pool(Servers([url]))
            for _ in range(FAILURES):
                pool.balance.failed(url)
            pool.balance.open(url)
            async with pool.post("/v1/completions", BODY) as (address, response):
                async for _ in pool.parts(address, response):
                    break
            assert (pool.balance.used, pool.balance.circuits[url].failures) == ([url], 0)
            await pool.close()

    asyncio.run(all_of_it())


def test_streams_that_only_take_long_or_whose_clients_leave_take_no_server_out_of_use() -> None:
    async def all_of_it() -> None:
        async with streaming(1, 0.05) as slow, streaming(1) as silent:
            for url, most, end in ((slow, None, "504"), (silent, 1, "left")):
                pool = Pool(Servers([url]))
                gateway = before(pool, 0.4)
                assert [await streamed(gateway, f"c{i}", most) for i in range(FAILURES + 1)] == [end] * (FAILURES + 1)
                assert pool.balance.used == [url]
                await pool.close()

    asyncio.run(all_of_it())


@pytest.mark.parametrize("stream", [False, True])
def test_where_one_server_forgot_the_adapter_another_that_has_it_answers(stream: bool) -> None:
    """As one that was started again does: the base answers, or nobody, only where no server has it."""
    name, forgot, has = "refund@v1-aaaaaaaa", Stub(gone={"refund@v1-aaaaaaaa"}), Stub()

    async def told(gateway: Gateway, conversation: str) -> str:
        messages = [{"role": "user", "content": "x"}]
        asked = parse_chat({"model": name, "messages": messages, "stream": stream})
        if not stream:
            return (await gateway.answer(asked, "", conversation))[1]["x-trace-adapter"]
        streamed = await gateway.stream(asked, "", conversation)
        assert name in "".join([part.decode() async for part in streamed.events])
        await streamed.close()
        return streamed.headers["x-trace-adapter"]

    async def all_of_it(urls: list[str]) -> None:
        fleet = HandMadeFleet(name)
        fleet.known[name] = replace(fleet.known[name], replicas=tuple(urls))
        settings = GatewaySettings("shop", base="stub-base", missing="503")
        gateway = Gateway(settings, HttpUpstream(Pool(Servers(urls)), "stub-base"), fleet)
        try:
            assert {await told(gateway, f"c{i}") for i in range(12)} == {name}
            assert set(fleet.reported) == {(name, urls[0])}
            has.gone.add(name)
            with pytest.raises(ApiError, match="is not live"):
                await told(gateway, "c")
        finally:
            await gateway.upstream.close()
        assert set(fleet.reported) == {(name, url) for url in urls}
        assert +fleet.held == Counter()

    with serving(forgot.app) as one, serving(has.app) as other:
        asyncio.run(all_of_it([one, other]))


def sampled(url: str, request: Request, streamed: bool) -> Generation:
    """What the gateway has a server sample for a turn that it rendered."""

    async def ask() -> Generation:
        engine = HttpTokens(Pool(Servers([url])), "base", 1000, frozenset({7}))
        try:
            *_, done = [part async for part in engine.generate(request, streamed)]
        finally:
            await engine.close()
        assert isinstance(done, Generation)
        return done

    return asyncio.run(ask())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("model", "ids", "told"),
    [("base", [5, 7], "answered as 'base', asked was 'refund@v1-aaaaaaaa'"), ("", None, "gives no token ids")],
)
def test_an_answer_of_another_model_or_without_ids_is_no_answer(
    streamed: bool, model: str, ids: list[int] | None, told: str
) -> None:
    """A proxy may fall back to the base, or leave out what it does not know: the first would be signed with the
    adapter's name, the second be an empty text."""

    async def answer(request: HttpRequest) -> Response:
        asked = await request.json()
        choice = {"index": 0, "text": "Refunded.", "finish_reason": "stop", "token_ids": ids}
        body = {"model": model or asked["model"], "choices": [choice]}
        return Response(event(body) + event("[DONE]") if streamed else json.dumps(body).encode())

    turn = Request("c", [1, 2], Sampling(1.0, 5, 0), "refund@v1-aaaaaaaa")
    with (
        serving(Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])) as url,
        pytest.raises(ApiError, match=told) as refused,
    ):
        sampled(url, turn, streamed)
    assert refused.value.status == 502


def test_the_gateway_has_turns_sampled_as_rounds_have() -> None:
    """Whatever is left out, the server's generation_config.json decides."""
    turn = Request("c", [1, 2], Sampling(0.3, 2, 5))
    with vllm_stub() as stub:
        policy = VllmPolicy([VllmServer(stub.url, "base")], PolicyIdentity("small", "r1", "", "", ""), frozenset({7}))
        (proven,) = policy.generate([turn])
        policy.close()
        in_round = {k: v for k, v in stub.bodies[-1].items() if k != "logprobs"}
        assert sampled(stub.url, turn, False).ids == proven.ids
        served = {k: v for k, v in stub.bodies[-1].items() if k not in ("stream", "add_special_tokens")}
    assert served == in_round
    assert {"min_p", "ignore_eos", "stop_token_ids"} <= set(served)
