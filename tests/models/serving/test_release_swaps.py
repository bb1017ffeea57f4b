"""Releases that are swapped under load: many clients over HTTP, a gateway, the real fleet, stub servers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from environments.contract import Prompt
from models.adapters.files import RegisteredAdapter
from models.router.router import RouteDecision, Router
from models.serving.fleet.lifecycle import Reconciler
from models.serving.fleet.releases import ServedRelease
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.conversations import RouteMaker
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.upstreams.contract import AdapterGone, Replica, Turn
from models.vllm import server as vllm_server
from tests.models.serving.fleet_staged import MOVE, Stage, staged
from tests.models.serving.gateway_servers import serving

SWAPS, CLIENTS = 20, 4
CAPABILITIES = ("pay", "ship", "")
WORDS = ("pay 7", "ship it", "what is this?")
Signature = tuple[str, str, str, str]


def wanted(words: str) -> str:
    """The capability that all routers choose for these words."""
    return next((c for c in ("pay", "ship") if words.startswith(c)), "")


def fitted(number: int) -> Router:
    """The router of a release: each capability is a direction; its ids name the release."""
    rng = np.random.default_rng(number)
    rows = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0) + 0.01 * rng.standard_normal((12, 3)).astype(np.float32)
    return Router.fit(rows, [c for c in CAPABILITIES for _ in range(4)], [f"{number}/{i}" for i in range(12)])


class SlowRoutes(RouteMaker):
    """Asks the given router after a while, in which another release may come."""

    def __init__(self) -> None:
        self.prompt = Prompt()

    async def decide(self, words: str, router: Router) -> RouteDecision:
        await asyncio.sleep(random.uniform(0, 0.03))
        direction = np.eye(3, dtype=np.float32)[CAPABILITIES.index(wanted(words))]
        # The header of the mode tells which release's router decided, whatever the others say.
        return replace(router.decide(direction[None])[0], mode=router.ids[0].partition("/")[0])


class LoadedUpstream:
    """Answers after a while with an adapter that the server has from the beginning of the answer to its end."""

    longest = 0

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def ahead(self, prompt: Prompt) -> int:
        return 0

    def check(self, turn: Turn) -> None:
        if turn.adapter is not None and turn.adapter.name not in self.stage.stubs[0].names:
            raise AdapterGone("a stub")

    async def answer(self, turn: Turn) -> dict[str, Any]:
        for _ in range(3):
            self.check(turn)
            await asyncio.sleep(random.uniform(0, 0.01))
        self.check(turn)
        return {"model": turn.name}

    async def stream(self, turn: Turn) -> AsyncGenerator[bytes]:
        body = await self.answer(turn)
        yield f"data: {body['model']}\n\n".encode()
        await asyncio.sleep(random.uniform(0, 0.01))
        self.check(turn)
        yield b"data: [DONE]\n\n"

    async def replicas(self) -> list[Replica]:
        return [Replica("a stub", True)]

    async def close(self) -> None: ...


def releases_of(stage: Stage) -> list[ServedRelease | None]:
    """Four releases that share some adapters and no router, and the base alone."""
    one, two = stage.one, stage.two
    ships: list[RegisteredAdapter] = [
        stage.shelf.add(stage.shelf.folders[a.served_name], "ship", n) for n, a in ((1, one), (2, two))
    ]
    for stub in stage.stubs:
        stub.moves |= {a.served_name: MOVE for a in ships}
    members = ([one, ships[0]], [two, ships[0]], [two, ships[1]], [one])
    made = [ServedRelease(n, {a.capability: a for a in m}, fitted(n)) for n, m in enumerate(members, 1)]
    return [*made, None]


def test_no_request_fails_and_none_sees_a_mixture_while_releases_are_swapped(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "WAITS", (0.01, 0.01, 0.01))
    with staged(tiny_model[0].model, tmp_path) as stage:
        releases = releases_of(stage)
        whole = {("none", words): ("none", "off", "", "none") for words in WORDS}
        for release in (r for r in releases if r is not None):
            assert release.router is not None
            number, names = str(release.number), {c: a.served_name for c, a in release.members.items()}
            for words in WORDS:
                adapter = names.get(wanted(words), "none")
                whole[number, words] = (number, number, release.router.version, adapter)
        stage.fleet.drain_seconds, stage.fleet.hosts = 60, stage.fleet.hosts[:1]
        gateway = Gateway(GatewaySettings("shop", most_requests=1000), LoadedUpstream(stage), stage.fleet, SlowRoutes())
        over = threading.Event()
        answers: Counter[Signature] = Counter()
        wrong: list[Any] = []

        def client(url: str, number: int) -> None:
            turn = 0
            with httpx.Client(trust_env=False, timeout=60) as http:
                while not over.is_set():
                    turn += 1
                    words = WORDS[turn // 4 % 3]
                    headers = {"x-trace-conversation": f"c{number}-{turn // 4}"} if turn % 2 else {}
                    body = {
                        "model": "trace",
                        "messages": [{"role": "user", "content": f"{words} {number}/{turn // 2}"}],
                        "stream": turn % 5 == 0,
                    }
                    answer = http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
                    head = answer.headers
                    if answer.status_code != 200 or "x-trace-missing" in head or "error" in answer.text:
                        wrong.append((answer.status_code, dict(head), answer.text))
                        continue
                    names = ("release", "mode", "router", "adapter")
                    signature: Signature = tuple(head.get(f"x-trace-{name}", "") for name in names)  # type: ignore[assignment]
                    answers[signature] += 1
                    if signature != whole[signature[0], words]:
                        wrong.append((words, signature))

        late = []
        with serving(GatewayApp(gateway, Reconciler(stage.fleet, follow_seconds=0.02))) as url:
            threads = [threading.Thread(target=client, args=(url, n)) for n in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for swap in range(SWAPS):
                live = releases[swap % len(releases)]
                stage.shelf.wanted, began = live, time.monotonic()
                while stage.fleet.standing().serving.number != (live.number if live else 0):
                    assert time.monotonic() < began + 30, stage.fleet.standing()
                    time.sleep(0.005)
                late.append(time.monotonic() - began)
                time.sleep(0.1)
            over.set()
            for thread in threads:
                thread.join()
            assert wrong == []
            assert set(answers) == set(whole.values()), "every release answered with all that it has"
            # Nobody is left in a generation that is gone: what is not served is unloaded.
            end = time.monotonic() + 20
            while stage.stubs[0].names:
                assert time.monotonic() < end, (stage.states(), stage.fleet._requests)
                time.sleep(0.02)
        assert max(late) < 10
