"""A model in this process whose forward pass fails: later turns are answered, or it is told that none will be. And what
fails otherwise behind an answer, for which a client gets an error as well."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import torch

from errors import NotFinite, ProviderError
from models.renderer import Renderer
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.upstreams.local_engine import LocalEngine
from models.serving.upstreams.rendered import RenderedUpstream
from tests.models.serving.gateway_running import error, run
from tests.models.serving.gateway_servers import HandMadeFleet, serving

Tiny = tuple[Any, Renderer]
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"


def fails(*_: object) -> Any:
    raise RuntimeError(NO_MEMORY)


def app_of(engine: LocalEngine, renderer: Renderer) -> GatewayApp:
    return GatewayApp(Gateway(GatewaySettings("shop"), RenderedUpstream(engine, renderer), HandMadeFleet()))


def asked(url: str) -> httpx.Response:
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


def test_a_pass_that_fails_is_a_503_and_the_next_turn_is_answered_as_before(
    tiny_model: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    policy, renderer = tiny_model
    engine, step, ends = LocalEngine(policy, lambda: ends.append(1)), policy.step, list[int]()
    engine.start()
    with serving(app_of(engine, renderer)) as url:
        before = asked(url)
        policy.step = fails
        refused = asked(url)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "alloc_cpu" not in refused.text, "what failed is for the log"
        assert "RuntimeError: [enforce fail at alloc_cpu" in caplog.text
        policy.step = step
        after = asked(url)
    assert (before.status_code, after.status_code) == (200, 200)
    assert after.json()["choices"] == before.json()["choices"]
    assert ends == [], "an engine that was stopped has not died"


def test_weights_that_have_come_apart_are_told_with_what_helps(tiny_model: Tiny) -> None:
    policy, renderer = tiny_model
    engine, step = LocalEngine(policy), policy.step
    engine.start()

    def comes_apart() -> Any:
        raise NotFinite("adapter 'a@1' gives log-probabilities that are not finite")

    with serving(app_of(engine, renderer)) as url:
        policy.step = comes_apart
        refused = asked(url)
        assert refused.status_code == 503
        assert "adapter 'a@1' gives log-probabilities that are not finite (trace-agent rollback)" in refused.text
        policy.step = step
        assert asked(url).status_code == 200


@pytest.mark.parametrize("broken", ["close", "gpu"])
def test_an_engine_that_cannot_go_on_after_a_pass_refuses_who_waits_and_says_that_it_has_ended(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    policy, renderer = tiny_model
    ended = threading.Event()
    engine = LocalEngine(policy, ended.set)
    engine.start()
    policy.step = fails
    if broken == "close":
        policy.close = fails
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with serving(app_of(engine, renderer)) as url:
        assert asked(url).status_code == 503
        assert ended.wait(10)
        assert not engine.alive


def test_an_end_passes_over_calls_that_were_cancelled(tiny_model: Tiny) -> None:
    policy, _ = tiny_model
    engine, busy = LocalEngine(policy), threading.Event()
    engine.start()
    engine.call(busy.wait)
    left, waits = engine.call(lambda: 1, alone=True), engine.call(lambda: 2, alone=True)
    assert left.cancel()
    engine._alone.extend([engine._inbox.get_nowait(), engine._inbox.get_nowait()])  # as while turns are in flight
    engine._inbox.put(None)
    busy.set()
    with pytest.raises(ProviderError, match="was stopped"):
        waits.result(20)
    engine.stop()


def test_a_defect_is_answered_counted_and_logged_as_one(caplog: pytest.LogCaptureFixture) -> None:
    """Before an answer, in the middle of one, and a stream that ends before it began."""

    async def breaks(*_: object) -> Any:
        raise RuntimeError("in /secret/path")

    async def breaks_later(*_: object) -> AsyncGenerator[bytes]:
        yield b"data: {}\n\n"
        await breaks()

    async def ends(*_: object) -> AsyncGenerator[bytes]:
        for nothing in ():
            yield nothing

    with run() as running:
        upstream: Any = running.gateway.upstream
        upstream.answer, upstream.stream = breaks, ends
        whole, empty = running.chat("x"), running.chat("x", stream=True)
        upstream.stream = breaks_later
        half = running.chat("x", stream=True)
        counts = {
            status: running.figure(f'trace_gateway_requests_total{{path="/v1/chat/completions",status="{status}"}}')
            for status in (200, 499, 500, 502)
        }
        assert running.gateway.in_flight == 0
        assert running.gateway.metrics.share.total() == 0, "half an answer is none"
    assert (whole.status_code, error(whole)["code"]) == (500, "internal_error")
    assert (empty.status_code, error(empty)["code"]) == (502, "upstream_error")
    assert (half.status_code, half.text.splitlines()[0]) == (200, "data: {}")
    assert json.loads(half.text.strip().splitlines()[-1].removeprefix("data: ")) == whole.json()
    assert counts == {200: 1, 499: 0, 500: 1, 502: 1}
    assert "RuntimeError: in /secret/path" in caplog.text
    assert "/secret" not in whole.text + half.text
