"""Feedback while the database hangs is refused in time, and no other request waits for it; so is what says nothing."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import pytest

from db import Store
from errors import StoreError
from models.policy import PolicyIdentity
from models.router.router import RouteDecision
from models.serving.gateway import traffic_log
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.conversations import Routed
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.gateway.traffic_log import Feedback, LoggedTurn, TrafficLog, parse_feedback
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import ChatRequest
from models.serving.upstreams.contract import Turn
from models.serving.upstreams.local_engine import LocalEngine
from models.serving.upstreams.rendered import LONG, RenderedUpstream
from tests.models.serving.gateway_servers import HandMadeFleet, serving

# More than asyncio has threads for what blocks.
CLIENTS = min(32, (os.cpu_count() or 1) + 4) + 2
SAID = {"conversation": "c", "success": True}
LONG_CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "user": "x" * LONG}


class Hanging:
    """A store that does not answer before `over` is set, and then fails."""

    def __init__(self) -> None:
        self.over = threading.Event()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        if self.over.wait(60):
            raise StoreError("database at /secret/path is away")
        yield


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(traffic_log, "SAY_SECONDS", 0.3)
    monkeypatch.setattr(traffic_log, "CLOSE_SECONDS", 0.1)
    store = Hanging()
    yield store
    store.over.set()


def log_of(store: Hanging) -> TrafficLog:
    return TrafficLog(cast("Store", store), PolicyIdentity("tiny", "1"), "shop", 1.0, lambda _: None)


def test_feedback_that_a_database_does_not_take_is_a_503_and_keeps_no_prompt_waiting(
    tiny_model: Any, hanging: Hanging
) -> None:
    policy, renderer = tiny_model
    engine = LocalEngine(policy)
    engine.start()
    gateway = Gateway(GatewaySettings("shop"), RenderedUpstream(engine, renderer), HandMadeFleet(), log=log_of(hanging))

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
            words = [asyncio.create_task(client.post("/v1/feedback", json=SAID)) for _ in range(CLIENTS)]
            await asyncio.sleep(0.1)
            assert (await client.post("/v1/chat/completions", json=LONG_CHAT)).status_code == 200
            refused = await asyncio.gather(*words)
            assert [(r.status_code, r.headers["retry-after"]) for r in refused] == [(503, "30")] * CLIENTS
            hanging.over.set()
            failed = await client.post("/v1/feedback", json=SAID)
            assert (failed.status_code, "/secret" in failed.text) == (503, False)

    with serving(GatewayApp(gateway)) as url:
        asyncio.run(ask(url))


def test_a_gateway_ends_though_its_database_hangs(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    log = log_of(hanging)
    with pytest.raises(ApiError, match="does not answer"):
        asyncio.run(log.say("", Feedback("c", success=True)))
    log.close()
    assert "conversations that wait for it are lost" in caplog.text


def test_what_waits_for_a_database_that_hangs_is_bounded_in_bytes(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traffic_log, "WAITING_BYTES", 10)
    counted = list[str]()
    log = TrafficLog(cast("Store", hanging), PolicyIdentity("tiny", "1"), "shop", 1.0, counted.append)
    turn = Turn(ChatRequest("trace", True, {}, size=4), None, "base", "c")
    routed = Routed("c", RouteDecision("", {"": 1.0}, (), 0.0, "off"))

    def add() -> None:
        log.add(LoggedTurn("", routed, turn, 0.1))

    for _ in range(4):
        add()
    assert counted == ["dropped"] * 2, "two wait, with the one that is being stored"
    hanging.over.set()
    log.flush()
    add()
    log.flush()
    assert caplog.text.count("a conversation was not stored") == 3, "the room of those that are through is free again"
    log.close()


class Away:
    """A store that is away for the first `fails` times."""

    def __init__(self, fails: int) -> None:
        self.fails, self.tries = fails, 0

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        self.tries += 1
        if self.tries <= self.fails:
            problem = StoreError("the database is away")
            problem.transient = True
            raise problem
        yield


def logged(monkeypatch: pytest.MonkeyPatch, store: Away) -> tuple[TrafficLog, list[str], list[str]]:
    """A log before that store, what it counts, and the conversations that it stores."""
    counted, kept = list[str](), list[str]()
    monkeypatch.setattr(TrafficLog, "_keep", lambda self, connection, spoken: kept.append(spoken.routed.name))
    log = TrafficLog(cast("Store", store), PolicyIdentity("tiny", "1"), "shop", 1.0, counted.append)
    turn = Turn(ChatRequest("trace", True, {}, size=4), None, "base", "c")
    for name in ("first", "second"):
        log.add(LoggedTurn("", Routed(name, RouteDecision("", {"": 1.0}, (), 0.0, "off")), turn, 0.1))
    return log, counted, kept


def test_turns_wait_for_a_database_that_is_away_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traffic_log, "AGAIN", (0.01, 0.02))
    log, counted, kept = logged(monkeypatch, store := Away(2))
    log.flush()
    assert (counted, kept, store.tries) == (["stored", "stored"], ["first", "second"], 4)
    assert caplog.text.count("conversations wait to be stored: the database is away") == 1
    log.close()
    log, counted, kept = logged(monkeypatch, Away(4))
    log.flush()
    assert (counted, kept) == (["dropped", "stored"], ["second"]), "it is not waited for without end"
    log.close()


def test_a_gateway_that_ends_waits_for_no_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    log, counted, kept = logged(monkeypatch, Away(10))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 10
    assert (counted, kept) == (["dropped", "dropped"], [])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"conversation": "c"},
        {"conversation": 5, "success": True},
        *({"conversation": "c", "reward": reward} for reward in (2, True)),
        {"conversation": "c", "success": "yes"},
        {"conversation": "c", "comment": "x" * 5000},
    ],
)
def test_feedback_that_says_nothing_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse_feedback(body)
    assert refused.value.status == 400
