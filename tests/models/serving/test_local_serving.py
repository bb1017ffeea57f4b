"""The model in this process as a server: its engine, what clients see of its turns, and official clients against it."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from environments.contract import Prompt
from environments.targets.shop.target import target
from errors import ContextOverflow, ProviderError
from models.adapters.deltas import Delta
from models.policy import Generation, Request, Sampling
from models.renderer import Renderer
from models.router.router import RouteDecision, Router
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.conversations import RouteMaker
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings, Preset
from models.serving.openai_api.turn_reader import TurnReader
from models.serving.upstreams.local_engine import LocalEngine
from models.serving.upstreams.rendered import RenderedUpstream
from tests.models.serving.gateway_servers import HandMadeFleet, serving

Tiny = tuple[Any, Renderer]
PROMPT = list(range(10, 40))


def request(name: str, adapter: str | None = None, tokens: int = 12, temperature: float = 0.0) -> Request:
    return Request(name, PROMPT, Sampling(temperature, tokens, 3), adapter)


def lift(policy: Any, name: str, seed: int) -> None:
    """Load a random adapter."""
    generator = torch.Generator().manual_seed(seed)
    deltas = {n: 0.3 * torch.randn(layer.base.shape, generator=generator) for n, layer in policy.decoder.layers.items()}
    policy.load_deltas(name, name, {n: Delta.dense(d) for n, d in deltas.items() if "layers" in n})


async def whole(engine: LocalEngine, one: Request, streamed: bool = False) -> tuple[list[int], Generation]:
    parts: list[int] = []
    async for part in engine.generate(one, streamed):
        if isinstance(part, Generation):
            return parts, part
        parts += part
    raise AssertionError("the turn ended without its generation")


def test_turns_of_many_callers_are_those_of_the_policy_alone(tiny_model: Tiny) -> None:
    policy, _ = tiny_model
    for seed, name in enumerate(("a", "b")):
        lift(policy, name, seed)
    wanted = {name: policy.generate([request("x", name)])[0].ids for name in (None, "a", "b")}
    assert len(set(wanted.values())) == 3

    async def ask() -> list[tuple[list[int], Generation]]:
        names = (None, "a", "b") * 6
        return list(await asyncio.gather(*(whole(engine, request(f"s{i % 4}", n), True) for i, n in enumerate(names))))

    with LocalEngine(policy) as engine:
        answers = asyncio.run(ask())
        assert engine.load == 0
    for (parts, generation), name in zip(answers, (None, "a", "b") * 6, strict=True):
        assert generation.ids == wanted[name]
        assert tuple(parts) == generation.ids[: len(parts)]


def test_leaving_and_loading_between_turns(tiny_model: Tiny) -> None:
    policy, _ = tiny_model

    async def leave() -> None:
        task = asyncio.create_task(whole(engine, request("long", None, 400)))
        while not policy.busy:
            await asyncio.sleep(0.005)
        loading = engine.call(lambda: lift(policy, "late", 5), alone=True)
        assert not loading.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wrap_future(loading)
        assert not policy.busy
        assert (await whole(engine, request("next", "late")))[1].finish_reason in ("length", "stop")

    with LocalEngine(policy) as engine:
        asyncio.run(leave())
    assert "late" in policy.adapters


def test_errors_reach_their_caller_and_nobody_waits_for_ever(tiny_model: Tiny) -> None:
    policy, _ = tiny_model

    async def too_long() -> None:
        await whole(engine, request("x", None, 10_000))

    async def stopped() -> None:
        task = asyncio.create_task(whole(engine, request("x", None, 450)))
        while not policy.busy:
            await asyncio.sleep(0.005)
        await engine.close()
        with pytest.raises(ProviderError):
            await task

    engine = LocalEngine(policy)
    engine.start()
    with pytest.raises(ContextOverflow):
        asyncio.run(too_long())
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result()
    asyncio.run(stopped())
    with pytest.raises(ProviderError):
        engine.call(lambda: None)


def test_a_pass_that_the_gpu_has_no_memory_for_costs_the_turns_in_flight_alone(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, _ = tiny_model
    wanted = policy.generate([request("x")])[0].ids
    step, held, emptied = policy.step, list[Any](), list[bool]()

    def runs_out() -> Any:
        hidden = torch.zeros(3)
        held.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")

    def second_step() -> Any:
        step()
        policy.step = runs_out
        return []

    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(held[-1]() is None))

    async def ask() -> None:
        policy.step = second_step
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        turns = [whole(engine, request(f"s{i}", None, 400), True) for i in range(3)]
        problems = await asyncio.gather(*turns, return_exceptions=True)
        for problem in problems:
            assert isinstance(problem, ProviderError)
            assert problem.transient
            assert "no memory left (1.50 GiB more were asked for)" in str(problem)
        assert (policy.busy, policy.sampled(), policy._cache.room, engine.load) == (False, {}, 0, 0)
        assert emptied[0], "what the pass held is free before the GPU is given its memory back"
        policy.step = step
        assert engine.alive
        assert (await whole(engine, request("next")))[1].ids == wanted
        # So it is with work on the policy, a router's for one.
        with pytest.raises(ProviderError, match="no memory left"):
            await asyncio.wrap_future(engine.call(runs_out))
        assert emptied[-1]
        assert policy._cache.room == 0
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert (await whole(engine, request("last")))[1].ids == wanted

    with LocalEngine(policy) as engine:
        asyncio.run(ask())
    assert "3 turns in flight are refused" in caplog.text


def test_a_router_that_the_gpu_has_no_memory_for_refuses_and_decides_again_later(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, renderer = tiny_model
    router = Router("linear", offsets=(0.0,))
    decided = RouteDecision("", {"": 1.0}, (), 0.0, "linear")

    def runs_out(self: Router, *_: object) -> list[RouteDecision]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")

    async def ask() -> None:
        monkeypatch.setattr(Router, "route", runs_out)
        with pytest.raises(ProviderError, match=r"no memory left \(1\.50 GiB more") as raised:
            await maker.decide("one", router)
        assert raised.value.transient
        monkeypatch.setattr(Router, "route", lambda *_: [decided])
        assert (await maker.decide("two", router)).mode == "linear"

    with LocalEngine(policy) as engine:
        maker = RouteMaker(engine, renderer, Prompt("A shop."))
        asyncio.run(ask())


def test_routed_requests_are_refused_once_the_engine_has_ended(tiny_model: Tiny) -> None:
    policy, renderer = tiny_model
    engine, busy, router = LocalEngine(policy), threading.Event(), Router("linear", offsets=(0.0,))
    maker = RouteMaker(engine, renderer, Prompt("A shop."))

    async def ended() -> None:
        engine.start()
        engine.call(busy.wait)
        engine._inbox.put(None)  # the end: what is asked from now on stands behind it
        asked = [asyncio.create_task(maker.decide(words, router)) for words in ("one", "two")]
        await asyncio.sleep(0)
        busy.set()
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            for words in ("three", "four"):
                outcomes += await asyncio.gather(maker.decide(words, router), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ProviderError] * 4

    asyncio.run(ended())
    engine.stop()


def test_an_adapter_in_demand_does_not_starve_another(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.serving.upstreams.local_engine.PATIENCE", 0.05)
    policy, _ = tiny_model
    lift(policy, "a", 1)
    over = threading.Event()

    async def crowd() -> None:
        while not over.is_set():
            await whole(engine, request("crowd", "a", 20))

    async def ask() -> None:
        crowds = [asyncio.create_task(crowd()) for _ in range(4)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await whole(engine, request("alone"))
        over.set()
        await asyncio.gather(*crowds)

    with LocalEngine(policy) as engine:
        asyncio.run(ask())


# --- what a client is shown -------------------------------------------------------------------------------------


def tools(*names: str) -> list[dict[str, Any]]:
    properties = {"order": {"type": "integer"}}
    return [{"type": "function", "function": {"name": n, "parameters": {"properties": properties}}} for n in names]


@pytest.mark.parametrize(
    ("calls", "text", "shown", "called"),
    [
        ("compact", "Order 5 is pending.", "Order 5 is pending.", []),
        ("compact", "find(5)", "", ["find"]),
        ("compact", "find the order", "find the order", []),
        ("compact", "2nd:find(5)", "", ["2nd:find"]),
        ("compact", "drop(5)", "drop(5)", []),
        ("compact", "find(5) is what I would do", "find(5) is what I would do", []),
        (
            "json",
            'Let me see. <tool_call>{"name": "find", "arguments": {"order": 5}}</tool_call>',
            "Let me see. ",
            ["find"],
        ),
        ("json", "a < b <tool", "a < b <tool", []),
        ("json", "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ("compact", "ü漢字☃", "ü漢字☃", []),
    ],
)
def test_text_is_shown_as_it_comes_and_calls_are_held_back(
    tiny_tokenizer: Any, calls: str, text: str, shown: str, called: list[str]
) -> None:
    renderer = Renderer(tiny_tokenizer, calls)
    reader = TurnReader(renderer, tools("find", "move", "2nd:find"))
    ids = [*renderer.text_ids(text), renderer.end_id]
    told = [reader.feed([i]) for i in ids]
    action, rest = reader.finish()
    assert "".join(told) + rest == shown
    assert [c.name for c in action.tool_calls] == called
    assert "\ufffd" not in "".join(told)
    if not called and calls == "compact" and text.startswith("Order"):
        assert rest == "", "plain text was held back"


# --- official clients on the embedded model ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop() -> Preset:
    environment = target().environment()
    return Preset("shop", Prompt.of(environment))


@pytest.fixture(scope="module")
def client(embedded_model: Any, shop: Preset) -> Iterator[openai.OpenAI]:
    policy, renderer = embedded_model
    context, policy.context = policy.context, 1024
    engine = LocalEngine(policy)
    engine.start()
    gateway = Gateway(GatewaySettings("shop"), RenderedUpstream(engine, renderer), HandMadeFleet(), None, None, shop)
    with serving(GatewayApp(gateway)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    policy.context = context
    assert not engine.alive


def said(*texts: str) -> Any:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.model
def test_tool_calls_of_the_embedded_model(client: openai.OpenAI, shop: Preset) -> None:
    asked: Any = {"model": "base", "temperature": 0, "messages": said("Refund 7 of order 264.")}
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("refund", {"order": 264, "amount": 7})
    assert (whole.choices[0].finish_reason, whole.model) == ("tool_calls", "base")
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 3
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = [c for p in parts for choice in p.choices for c in choice.delta.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in streamed] == [("refund", call.function.arguments)]
    assert parts[-1].usage == whole.usage
    # The result goes back in OpenAI's form, and the model answers in words.
    history = [
        *asked["messages"],
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "ok"},
    ]
    final = client.chat.completions.create(model="base", temperature=0, messages=history)
    assert "264" in (final.choices[0].message.content or "")
    # The same prompt spelled out by the client is the same prompt.
    examples = [_as_openai(m) for m in shop.prompt.examples]
    own: Any = [{"role": "system", "content": shop.prompt.instructions}, *examples, *asked["messages"]]
    spelled = client.chat.completions.create(model="base", temperature=0, messages=own, tools=list(shop.prompt.tools))  # type: ignore[arg-type]
    assert spelled.choices[0].message.tool_calls[0].function == call.function  # type: ignore[union-attr,index]
    assert spelled.usage == whole.usage


def _as_openai(message: Any) -> dict[str, Any]:
    one: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        functions = [{"name": c.name, "arguments": json.dumps(dict(c.arguments))} for c in message.tool_calls]
        one["tool_calls"] = [{"id": "c", "type": "function", "function": f} for f in functions]
    if message.role == "tool":
        one["tool_call_id"] = "c"
    return one


@pytest.mark.model
def test_streams_and_completions_of_the_embedded_model(client: openai.OpenAI) -> None:
    asked: Any = {"model": "base", "temperature": 0, "max_tokens": 12, "messages": said("Where is order 648?")}
    asked["messages"] = [{"role": "system", "content": "You are a poet."}, *asked["messages"]]
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in parts) == text
    assert sum(bool(p.choices[0].delta.content) for p in parts) > 3
    plain: Any = {"model": "base", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    completion = client.completions.create(**plain)
    streamed = client.completions.create(**plain, stream=True)
    assert "".join(p.choices[0].text for p in streamed) == completion.choices[0].text
    assert "Paris" in completion.choices[0].text
    first = {
        client.chat.completions.create(**asked | {"temperature": 1, "seed": 5}).choices[0].message.content
        for _ in range(2)
    }
    assert len(first) == 1, "a seed makes the answer repeatable"


@pytest.mark.model
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "context_length_exceeded"),
        ({"max_tokens": 5000}, "context_length_exceeded"),
        ({"n": 3}, "invalid_request"),
        ({"tool_choice": "required"}, "invalid_request"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "invalid_request",
        ),
    ],
)
def test_what_the_embedded_model_cannot_do_is_said(client: openai.OpenAI, change: dict[str, Any], code: str) -> None:
    asked: dict[str, Any] = {"model": "base", "messages": said("x"), **change}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked, stream=stream)
        assert refused.value.code == code
