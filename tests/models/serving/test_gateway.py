"""The gateway over HTTP in front of an OpenAI-like server: official clients, routing, bad input, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import psutil
import pytest

from environments.contract import Message, Prompt
from models.providers.litellm_client import litellm_modules
from models.router.router import Router
from models.serving.fleet.lifecycle import AdapterState
from models.serving.gateway.conversations import RouteBook
from models.serving.gateway.settings import Preset
from models.serving.upstreams.http import HttpUpstream
from models.serving.upstreams.pool import Pool, Servers
from tests.models.serving.gateway_running import KEY, Running, WordRouter, built, error, run, signed
from tests.models.serving.gateway_servers import HandMadeFleet, Stub, serving

REFUND = {"name": "refund", "parameters": {"type": "object", "properties": {"order": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": REFUND}]


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Settings of the gateway are the parameter of an indirect parametrization."""
    with run(**getattr(request, "param", {})) as one:
        yield one


# --- clients ----------------------------------------------------------------------------------------------------


def test_official_client_whole_and_streamed_with_tools(running: Running) -> None:
    client = running.client()
    raw = client.chat.completions.with_raw_response.create(
        model="trace", messages=[{"role": "user", "content": "a refund please"}]
    )
    answer = raw.parse()
    assert answer.model == "refund@v1-aaaaaaaa"
    assert answer.choices[0].message.content == "you said a refund please"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8
    assert raw.headers["x-trace-adapter"] == "refund@v1-aaaaaaaa"
    assert raw.headers["x-trace-version"] == "1"
    assert raw.headers["x-trace-capability"] == "refund"
    assert json.loads(raw.headers["x-trace-route"]) == {"refund": 0.9, "none": 0.1}
    base = client.chat.completions.create(model="trace", messages=[{"role": "user", "content": "hello"}])
    assert base.model == "stub-base"

    asked: Any = {"model": "refund", "messages": [{"role": "user", "content": "call"}], "tools": TOOLS}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"order": 7}'
    parts = list(client.chat.completions.create(**asked, stream=True))
    calls = [c for p in parts for choice in p.choices for c in choice.delta.tool_calls or ()]
    assert {p.model for p in parts} == {"refund@v1-aaaaaaaa"}
    assert calls[0].function.name == "refund"
    assert "".join(c.function.arguments or "" for c in calls) == '{"order": 7}'
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    said = client.chat.completions.create(
        model="trace", messages=asked["messages"] + [{"role": "user", "content": "x"}], stream=True
    )
    assert "".join(p.choices[0].delta.content or "" for p in said) == "you said x"
    assert client.completions.create(model="stub-base", prompt="one").choices[0].text == "after one"
    names = ["trace", "stub-base", "refund@v1-aaaaaaaa"]
    assert [m.id for m in client.models.list()] == [client.models.retrieve(name).id for name in names] == names
    with pytest.raises(openai.NotFoundError, match="model 'of/nobody' does not exist; there are: trace"):
        client.models.retrieve("of/nobody")
    assert running.fleet.held["refund@v1-aaaaaaaa"] == 0
    assert running.stub.keys == {""}, "the client's key went to the server behind"


def test_litellm_client(running: Running) -> None:
    litellm, _ = litellm_modules()
    asked: Any = {"model": "openai/trace", "api_base": f"{running.url}/v1", "api_key": KEY, "max_retries": 0}
    messages = [{"role": "user", "content": "refund"}]
    assert litellm.completion(**asked, messages=messages).choices[0].message.content == "you said refund"
    parts = litellm.completion(**asked, messages=[{"role": "user", "content": "call"}], tools=TOOLS, stream=True)
    calls = [c for p in parts for c in p.choices[0].delta.tool_calls or ()]
    assert "".join(c.function.arguments or "" for c in calls) == '{"order": 7}'


# --- routing ----------------------------------------------------------------------------------------------------


def test_a_conversation_is_routed_once(running: Running) -> None:
    name = named(running.chat("refund 7"))
    later = goes_on(running, "refund 7", "you said refund 7", "hello, order 264")
    assert (named(later), later.json()["model"]) == (name, "refund@v1-aaaaaaaa")
    assert running.router.asked == 1
    # By id the first words do not matter.
    for text in ("refund it", "hello"):
        one = running.chat(text, headers={"x-trace-conversation": "mine"})
        assert (named(one), one.json()["model"]) == ("mine", "refund@v1-aaaaaaaa")
    assert running.router.asked == 2
    # The same words without an answer before them are another conversation, with the same route.
    assert named(running.chat("refund 7")) != name
    assert running.router.asked == 2


def named(answer: httpx.Response) -> str:
    """The id of an answer's conversation."""
    return answer.headers["x-trace-conversation"]


def goes_on(running: Running, *said: str, **given: Any) -> httpx.Response:
    """The answer to what was said in turn by the user and by an assistant."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return running.post({"model": "trace", "messages": messages}, **given)


def test_conversations_that_begin_alike_keep_their_ids(running: Running) -> None:
    anna, bert = named(running.chat("hello")), named(running.chat("hello"))
    for own, words in ((anna, "I am Anna"), (bert, "I am Bert"), (anna, "Anna still")):
        later = goes_on(running, "hello", "you said hello", words, **{"x-trace-conversation": own})
        assert named(later) == own
    # Without an id nothing tells whose turn this is, so it is neither's; from then on what was said tells it.
    turn = ("hello", "you said hello", "I am Cleo")
    cleo = named(goes_on(running, *turn))
    assert cleo not in (anna, bert)
    assert named(goes_on(running, *turn, "you said I am Cleo ", "and now?")) == cleo
    # An answer that nobody was given begins no known conversation.
    assert named(goes_on(running, "hello", "Good day.", "I am Anna")) not in (anna, bert, cleo)
    # Neither does one of before a restart, of which nothing is known.
    running.gateway.book = RouteBook()
    assert named(running.chat("hello")) not in (anna, bert, cleo)


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_without_an_id_is_known_by_the_answer_before_it(running: Running, stream: bool) -> None:
    name = named(running.chat("hello", stream=stream))
    assert named(goes_on(running, "hello", "you said hello", "more")) == name
    assert named(goes_on(running, "hello", "you said hello", "more", "you said more", "and more")) == name


def test_conversations_that_begin_alike_at_once_have_an_id_each(running: Running) -> None:
    decide = running.router.decide

    async def slow(words: str, router: Router) -> Any:
        await asyncio.sleep(0.1)
        return await decide(words, router)

    running.router.decide = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(lambda _: named(running.chat("refund 7")), range(3)))) == 3


def test_examples_that_a_client_sends_ahead_are_no_part_of_its_conversations(running: Running) -> None:
    examples = (Message("user", "refund 1"), Message("assistant", "Done."))
    running.router.prompt = Prompt(examples=examples)
    ahead = [{"role": "system", "content": "A shop."}, *({"role": m.role, "content": m.content} for m in examples)]
    names = set()
    for text, model in (("refund 7", "refund@v1-aaaaaaaa"), ("hello", "stub-base"), ("refund 7", "refund@v1-aaaaaaaa")):
        answer = running.post({"model": "trace", "messages": [*ahead, {"role": "user", "content": text}]})
        assert answer.json()["model"] == model
        names.add(answer.headers["x-trace-conversation"])
    assert len(names) == 3
    assert running.router.asked == 2


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_turn_that_may_call_no_tool_has_the_prompt_that_it_would_have(running: Running, tools: Any) -> None:
    running.gateway.preset = Preset("мой.laden:shop", Prompt("The target's instructions.", TOOLS))
    answer = running.chat("x", tool_choice="none", **({"tools": tools} if tools else {}))
    seen = running.stub.seen[0]
    assert answer.headers.get("x-trace-preset") == (None if tools else "%D0%BC%D0%BE%D0%B9.laden:shop")
    assert [m["content"] for m in seen["messages"]] == [*(() if tools else ["The target's instructions."]), "x"]
    assert seen.get("tools") == tools, "its own, and none of the target's"


ONE, TWO, SHIP = "refund@v1-aaaaaaaa", "refund@v2-bbbbbbbb", "ship@v1-cccccccc"


def test_a_conversation_goes_on_with_its_adapter_while_that_is_loaded(running: Running) -> None:
    running.stub.models += (TWO, SHIP)
    first, second, third = (Router.always(name) for name in ("refund", "ship", "more"))
    for name in ("mine", "theirs"):
        headers = {"x-trace-conversation": name}
        text = "refund" if name == "mine" else "hello"
        wanted = ONE if name == "mine" else "none"
        assert signed(running.chat(text, headers=headers)) == ("1", first.version, wanted)
    # Release 2 has the adapter too: the conversation goes on as it was routed; that of the base is routed anew.
    running.fleet.swap(2, ONE, SHIP, router=second)
    assert signed(running.chat("and 3 more", headers={"x-trace-conversation": "mine"})) == ("1", first.version, ONE)
    assert signed(running.chat("refund", headers={"x-trace-conversation": "theirs"})) == ("2", second.version, ONE)
    # Release 3 has another version: routed anew, by what the turn says.
    running.fleet.swap(3, TWO, router=third)
    assert signed(running.chat("refund", headers={"x-trace-conversation": "mine"})) == ("3", third.version, TWO)
    # The base alone: no route, no router, no adapter, and the routed name still answers.
    running.fleet.swap(0)
    alone = running.chat("refund", headers={"x-trace-conversation": "mine"})
    assert (signed(alone), alone.json()["model"]) == (("none", "", "none"), "stub-base")
    assert "x-trace-missing" not in alone.headers
    assert [m["id"] for m in running.gateway.models()] == ["trace", "stub-base"]


def test_where_nothing_was_said_to_the_router_an_answer_is_not_signed_with_it(running: Running) -> None:
    asked = {"model": "trace", "prompt": [1, 2, 3]}
    running.fleet.swap(2, ONE, router=Router.always("refund"))
    assert signed(running.post(asked, "/v1/completions")) == ("2", "", "none")
    running.fleet.swap(3, ONE, router=(off := Router.always()))
    assert signed(running.post(asked, "/v1/completions")) == ("3", off.version, "none")
    assert running.router.asked == 0


def test_the_same_words_begin_a_conversation_of_the_release_that_is_served(running: Running) -> None:
    second = Router.always("ship")
    name = running.chat("refund 7").headers["x-trace-conversation"]
    running.fleet.swap(2, ONE, router=second)
    again = running.chat("refund 7")
    assert (named(again) != name, signed(again)) == (True, ("2", second.version, ONE))


def test_a_swap_while_a_request_is_routed_changes_nothing_for_it(running: Running) -> None:
    """The router of release 1 decides while release 2, without its adapter, is swapped in."""
    first, decide = Router.always("refund"), running.router.decide

    async def slow(words: str, router: Router) -> Any:
        running.fleet.swap(2, SHIP, router=Router.always("ship"))
        running.fleet.known[ONE] = replace(running.fleet.known[SHIP], name=ONE, state=AdapterState.LIVE)  # still loaded
        return await decide(words, router)

    running.router.decide = slow  # type: ignore[method-assign]
    assert signed(running.chat("refund")) == ("1", first.version, ONE)
    assert set(running.fleet.entered.values()) == {0}, "what was entered is left"
    refused = running.chat("x", model="refund")
    assert refused.status_code == 404, "not a member of release 2"
    assert set(running.fleet.entered.values()) == {0}


def test_what_is_served_is_shown(running: Running) -> None:
    running.fleet.swap(4, ONE, router=Router.always("refund"))
    assert running.figure("trace_gateway_release ") == 4
    assert running.figure(f'trace_gateway_release_member{{adapter="{ONE}",capability="refund"}}') == 1
    assert abs(running.figure("trace_gateway_release_since_seconds") - time.time()) < 60
    running.fleet.swap(5, TWO)
    running.fleet.wanted, running.fleet.problem = 6, "ship is refused: not live"
    assert running.figure(f'trace_gateway_adapter_live{{adapter="{ONE}"}}') == 0, "what left has no row"
    told = 'trace_gateway_release_not_served{reason="ship is refused: not live",release="6"}'
    assert running.figure(told) == 1
    shown = httpx.get(f"{running.url}/status", headers={"authorization": f"Bearer {KEY}"}, trust_env=False).json()
    release = shown["release"]
    assert (release["number"], release["wanted"], release["members"]) == (5, 6, {"refund": TWO})
    assert (release["problem"], release["pinned"]) == ("ship is refused: not live", False)
    assert (shown["router"]["mode"], shown["routed"]) == ("off", "trace")


def test_what_is_no_member_counts_as_no_adapter(running: Running) -> None:
    running.fleet.swap(1, router=Router.always("refund"))
    answer = running.chat("refund")
    assert answer.json()["model"] == "stub-base"
    assert answer.headers["x-trace-capability"] == "none"
    assert "x-trace-missing" not in answer.headers


def test_a_missing_adapter_is_answered_by_the_base_and_told(running: Running) -> None:
    running.fleet.turn("refund@v1-aaaaaaaa", AdapterState.UNREACHABLE)
    answer = running.chat("refund")
    assert answer.json()["model"] == "stub-base"
    assert answer.headers["x-trace-missing"] == "refund"
    assert running.figure('trace_gateway_missing_adapter_total{capability="refund",policy="base"}') == 1


@pytest.mark.parametrize("running", [{"missing": "503"}], indirect=True)
def test_a_missing_adapter_is_refused_where_that_is_the_rule(running: Running) -> None:
    running.fleet.turn("refund@v1-aaaaaaaa", AdapterState.REFUSED)
    refused = running.chat("refund")
    assert (refused.status_code, error(refused)["code"]) == (503, "adapter_unavailable")
    running.fleet.turn("refund@v1-aaaaaaaa", AdapterState.LIVE)
    assert running.chat("refund", headers={"x-trace-conversation": "n"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_vanishes_from_its_server(running: Running, stream: bool) -> None:
    running.stub.gone.add("refund@v1-aaaaaaaa")
    answer = running.chat("refund", stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-trace-missing"] == "refund"
    assert answer.headers["x-trace-adapter"] == "none"
    assert "stub-base" in answer.text
    assert [name for name, _ in running.fleet.reported] == ["refund@v1-aaaaaaaa"]
    assert running.fleet.held["refund@v1-aaaaaaaa"] == 0


def test_another_replica_answers_for_one_that_is_gone() -> None:
    stub = Stub()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with serving(stub.app) as alive:
            app, _, _ = built(alive)
            app.gateway.upstream = HttpUpstream(Pool(Servers([dead, f"{alive}/v1"])), "stub-base")
            with serving(app) as url:
                one = Running(url, stub, HandMadeFleet(), app.gateway, WordRouter())
                assert [one.chat("hello").status_code for _ in range(4)] == [200] * 4
                assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
            app, _, _ = built(dead)
            with serving(app) as url:
                one = Running(url, stub, HandMadeFleet(), app.gateway, WordRouter())
                refused = one.chat("hello")
                assert (refused.status_code, error(refused)["type"]) == (503, "server_error")
                assert dead not in refused.text
                assert httpx.get(f"{url}/health", trust_env=False).status_code == 503


# --- time, load, clients that leave -----------------------------------------------------------------------------


def until(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)


@pytest.mark.parametrize("running", [{"deadline": 0.5}], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stalls_is_given_up(running: Running, stream: bool) -> None:
    late = running.chat("stall", stream=stream)
    assert (late.status_code, error(late)["code"]) == (504, "deadline_exceeded")
    until(lambda: running.stub.counts["cancelled"] == 1)
    assert running.gateway.in_flight == 0
    # One that stalls in the middle has sent its status already: the event says it.
    drip = running.chat("drip", stream=True)
    assert drip.status_code == 200
    assert json.loads(drip.text.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    until(lambda: running.gateway.in_flight == 0)


@pytest.mark.parametrize("text", ["stall", "drip"])
def test_a_client_that_leaves_ends_the_work(running: Running, text: str) -> None:
    body = json.dumps({"model": "refund", "messages": [{"role": "user", "content": text}], "stream": text == "drip"})
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: running.stub.counts["asked"] == 1)
        if text == "drip":
            assert client.recv(1000)
    until(lambda: running.stub.counts["cancelled"] == 1)
    until(lambda: running.gateway.in_flight == 0 and running.fleet.held["refund@v1-aaaaaaaa"] == 0)
    assert running.figure("trace_gateway_cancelled_total") == 1


@pytest.mark.parametrize("running", [{"most_requests": 2}], indirect=True)
def test_more_requests_than_places_are_told_to_come_again(running: Running) -> None:
    running.stub.delay = 1.0

    async def at_once() -> list[httpx.Response]:
        body = {"model": "trace", "messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(trust_env=False, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as client:
            return list(
                await asyncio.gather(*(client.post(f"{running.url}/v1/chat/completions", json=body) for _ in range(5)))
            )

    answers = asyncio.run(at_once())
    assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429]
    refused = next(a for a in answers if a.status_code == 429)
    assert error(refused)["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"


def test_nothing_grows_over_many_requests(running: Running) -> None:
    """`benchmarks/serving.py` does it 20,000 times."""
    process = psutil.Process(os.getpid())

    async def ask(count: int) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:

            async def one(index: int) -> None:
                body = {
                    "model": "trace",
                    "messages": [{"role": "user", "content": f"refund {index}"}],
                    "stream": index % 2 == 0,
                }
                assert (await client.post(f"{running.url}/v1/chat/completions", json=body)).status_code == 200

            for start in range(0, count, 16):
                await asyncio.gather(*(one(start + i) for i in range(16)))

    asyncio.run(ask(128))
    descriptors = process.num_fds()
    asyncio.run(ask(256))
    until(lambda: process.num_fds() <= descriptors + 8)
    # A stream ends on the server after its last event has reached the client.
    until(lambda: running.gateway.in_flight == 0 and running.fleet.held["refund@v1-aaaaaaaa"] == 0)
