"""Servers behind a gateway that are away when it starts, or come back as others."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from models.policy import Generation, Request, Sampling
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import parse_chat
from models.serving.upstreams.http import HttpTokens, HttpUpstream
from models.serving.upstreams.pool import Pool, Servers
from models.vllm import server as vllm_server
from models.vllm.answers import ServerAway
from settings import Settings, load_settings
from tasks.serving import replicas as replicas_opened
from tasks.serving.replicas import Replicas, open_replicas
from tests.models.serving.gateway_servers import HandMadeFleet, serving
from tests.models.serving.gateway_servers import Stub as EchoStub
from tests.models.vllm_backend.vllm_stub import Stub, vllm_stub

WEIGHTS, NOBODY = "w1", "http://127.0.0.1:9"
NONE_LEFT = "no server behind the gateway answers; ask again later"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))


def settings_for(folder: Path, *urls: str) -> Settings:
    return load_settings(home=folder, policy={"backend": "vllm", "url": ",".join(urls), "model": "base"})


def answered(replicas: Replicas, times: int = 8, name: str = "session") -> list[str]:
    """What the next turns of so many conversations get: "" for an answer, or what is said instead."""

    async def ask(session: str) -> str:
        engine = HttpTokens(replicas.pool, "base", replicas.context, frozenset())
        request = Request(session, (1, 2), Sampling(max_tokens=2, temperature=1.0, seed=0))
        try:
            assert isinstance([part async for part in engine.generate(request)][-1], Generation)
        except ApiError as problem:
            return str(problem)
        return ""

    async def all_of_them() -> list[str]:
        try:
            return [await ask(f"{name} {i}") for i in range(times)]
        finally:
            await replicas.pool.close()

    found = asyncio.run(all_of_them())
    replicas.pool._opened = None  # the next has a loop of its own
    return found


def turns_of(stub: Stub) -> int:
    """How many of those turns it was asked for; the rest are checks."""
    return sum(body["prompt"] == [1, 2] for body in stub.bodies)


def looked_at(replicas: Replicas) -> dict[str, str]:
    """What a look at each host says, by address."""
    found = {}
    for host in replicas.hosts:
        try:
            host.names()
            found[host.address] = ""
        except (ServerAway, ConfigurationError) as problem:
            found[host.address] = str(problem)
    return found


def test_a_gateway_begins_with_those_that_answer_and_the_others_join_it(
    settings_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with vllm_stub() as gone:
        port = int(gone.url.rpartition(":")[2])
    with vllm_stub() as there:
        there.weights = WEIGHTS
        replicas = open_replicas(settings_for(settings_folder, gone.url, there.url), WEIGHTS)
        assert (replicas.context, replicas.pool.held) == (64, {gone.url})
        assert f"no vLLM server answers at {gone.url}" in caplog.text
        assert "the gateway begins without it" in caplog.text
        assert answered(replicas) == [""] * 8
        said = looked_at(replicas)
        assert said.pop(there.url) == ""
        assert "no vLLM server answers" in said[gone.url]
        with vllm_stub(port) as back:
            assert answered(replicas) == [""] * 8
            assert not back.bodies, "nobody has looked whether it has the base"
            back.weights = WEIGHTS
            assert set(looked_at(replicas).values()) == {""}
            assert replicas.pool.held == set()
            checks = len(back.bodies)
            assert answered(replicas, name="new session") == [""] * 8
            assert len(back.bodies) > checks


@pytest.mark.parametrize(("how", "said"), [("hangs", "broke off after"), ("fails", "answers 503")])
def test_a_gateway_begins_without_one_that_hangs_or_fails(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, said: str
) -> None:
    monkeypatch.setattr(replicas_opened, "LOOK_SECONDS", 0.2)
    with vllm_stub() as there, socket.create_server(("127.0.0.1", 0)) as hung, vllm_stub() as broken:
        there.weights, broken.weights, broken.failures = WEIGHTS, WEIGHTS, [503] * 9
        url = broken.url if how == "fails" else f"http://127.0.0.1:{hung.getsockname()[1]}"
        began = time.monotonic()
        replicas = open_replicas(settings_for(settings_folder, url, there.url), WEIGHTS)
        assert time.monotonic() - began < 3
        assert replicas.pool.held == {url}
        assert said in caplog.text
        assert answered(replicas, 2) == ["", ""]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": "w2"}, "two models"),
        ({"weights": WEIGHTS, "context": 32}, "has a context of 32 tokens, and the gateway began with 64"),
        ({"weights": WEIGHTS, "raw_logprobs": True}, "do not follow the temperature"),
        ({"weights": WEIGHTS, "no_logprobs": True}, "gives no log-probabilities"),
    ],
)
def test_one_that_comes_back_as_another_gets_no_request_until_it_is_the_one(
    settings_folder: Path, changes: dict[str, Any], said: str
) -> None:
    with vllm_stub() as first:
        first.weights = WEIGHTS
        port = int(first.url.rpartition(":")[2])
        replicas = open_replicas(settings_for(settings_folder, first.url), WEIGHTS)
        assert answered(replicas) == [""] * 8
    assert "no vLLM server answers" in looked_at(replicas)[first.url]
    with vllm_stub(port) as other:
        for name, value in changes.items():
            setattr(other, name, value)
        assert said in looked_at(replicas)[first.url]
        assert said in looked_at(replicas)[first.url], "and it is looked at again"
        assert answered(replicas, 1) == [NONE_LEFT]
        assert [r.alive for r in asyncio.run(replicas.pool.replicas())] == [False]
        other.weights, other.context, other.raw_logprobs, other.no_logprobs = WEIGHTS, 64, False, False
        assert looked_at(replicas) == {first.url: ""}
        assert answered(replicas) == [""] * 8


def test_one_that_was_started_again_with_other_weights_between_two_looks_gets_no_request_after_the_next(
    settings_folder: Path,
) -> None:
    with vllm_stub() as first, vllm_stub() as again:
        first.weights = again.weights = WEIGHTS
        replicas = open_replicas(settings_for(settings_folder, first.url, again.url), WEIGHTS)
        assert set(looked_at(replicas).values()) == {""}
        again.weights, again.bodies[:] = "w2", []
        assert "two models" in looked_at(replicas)[again.url]
        assert replicas.pool.held == {again.url}
        assert answered(replicas) == [""] * 8
        assert turns_of(again) == 0
        again.weights = WEIGHTS
        assert set(looked_at(replicas).values()) == {""}
        assert answered(replicas, name="new session") == [""] * 8
        assert turns_of(again) > 0


@pytest.mark.parametrize("seen", ["a look", "a request"])
@pytest.mark.parametrize("weights", ["w2", WEIGHTS])
def test_one_that_was_lost_is_proven_before_its_next_request(settings_folder: Path, seen: str, weights: str) -> None:
    with vllm_stub() as gone:
        gone.weights = WEIGHTS
        port = int(gone.url.rpartition(":")[2])
        replicas = open_replicas(settings_for(settings_folder, gone.url), WEIGHTS)
        assert answered(replicas, 1) == [""]
    if seen == "a look":
        assert "no vLLM server answers" in looked_at(replicas)[gone.url]
    else:
        assert answered(replicas, 1) == [NONE_LEFT]
    with vllm_stub(port) as back:
        back.weights = weights
        right = weights == WEIGHTS
        assert answered(replicas, 2) == ["" if right else NONE_LEFT] * 2
        assert turns_of(back) == (2 if right else 0)
        assert (replicas.pool.unproven == set()) is right
        assert replicas.pool.held == (set() if right else {back.url})


def test_where_none_answers_or_one_is_another_it_does_not_start(settings_folder: Path) -> None:
    with vllm_stub() as gone:
        pass
    with pytest.raises(ServerAway, match=gone.url):
        open_replicas(settings_for(settings_folder, gone.url), WEIGHTS)
    with vllm_stub() as other:
        other.weights = "w2"
        with pytest.raises(ConfigurationError, match="two models"):
            open_replicas(settings_for(settings_folder, gone.url, other.url), WEIGHTS)
        other.weights, other.no_logprobs = WEIGHTS, True
        with pytest.raises(ConfigurationError, match=f"{other.url} gives no log-probabilities"):
            open_replicas(settings_for(settings_folder, gone.url, other.url), WEIGHTS)


@pytest.mark.parametrize("stream", [False, True])
def test_where_those_that_have_an_adapter_are_away_it_is_missing(stream: bool) -> None:
    """Until the next look at the servers its requests go where nobody is."""
    name, there = "refund@v1-aaaaaaaa", EchoStub()

    async def told(urls: list[str], missing: str) -> dict[str, str]:
        fleet = HandMadeFleet(name)
        fleet.known[name] = replace(fleet.known[name], replicas=(NOBODY,))
        settings = GatewaySettings("shop", base="stub-base", missing=missing)
        gateway = Gateway(settings, HttpUpstream(Pool(Servers(urls)), "stub-base"), fleet)
        asked = parse_chat({"model": name, "messages": [{"role": "user", "content": "x"}], "stream": stream})
        try:
            if not stream:
                return dict((await gateway.answer(asked, "", "c"))[1])
            streamed = await gateway.stream(asked, "", "c")
            assert "stub-base" in "".join([part.decode() async for part in streamed.events])
            await streamed.close()
            return dict(streamed.headers)
        finally:
            await gateway.upstream.close()
            assert +fleet.held == Counter()
            assert fleet.reported == [], "nobody has said that it does not know the adapter"

    with serving(there.app) as url:
        headers = asyncio.run(told([NOBODY, url], "base"))
        assert (headers["x-trace-adapter"], headers["x-trace-missing"]) == ("none", "refund")
        assert "x-trace-version" not in headers
        with pytest.raises(ApiError, match="the adapter of 'refund' is not live"):
            asyncio.run(told([NOBODY, url], "503"))
    with pytest.raises(ApiError, match="no server behind the gateway answers"):
        asyncio.run(told([NOBODY], "base"))
