"""A gateway in front of a stub, for tests over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai

from environments.contract import Prompt
from models.router.router import Router
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.conversations import RouteMaker
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.keys import Keys
from models.serving.gateway.settings import GatewaySettings
from models.serving.upstreams.http import HttpUpstream
from models.serving.upstreams.pool import Pool, Servers
from tests.models.serving.gateway_servers import HandMadeFleet, Stub, serving

KEY = "a-key-of-enough-length"


ADAPTER = "refund@v1-aaaaaaaa"


class WordRouter(RouteMaker):
    """Stands for the asking of fitted routers: "refund" in the words is the capability."""

    def __init__(self) -> None:
        self.prompt, self.asked = Prompt(), 0

    async def decide(self, words: str, router: Router) -> Any:
        self.asked += 1
        yes = "refund" in words
        decision = router.decide(count=1)[0]
        probabilities = {"refund": 0.9, "": 0.1} if yes else {"refund": 0.2, "": 0.8}
        return replace(decision, capability="refund" if yes else "", probabilities=probabilities, mode="retrieval")


@dataclass
class Running:
    """A gateway that answers at `url`, and what is behind it."""

    url: str
    stub: Stub
    fleet: HandMadeFleet
    gateway: Gateway
    router: WordRouter

    def client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, **given)

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {KEY}", **headers}
        return httpx.post(f"{self.url}{path}", content=content, headers=sent, timeout=60, trust_env=False)

    def chat(self, text: str, model: str = "trace", **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        return self.post({"model": model, "messages": [{"role": "user", "content": text}], **more}, **headers)

    def figure(self, line: str) -> float:
        metrics = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {KEY}"}, trust_env=False).text
        found = [float(x.rpartition(" ")[2]) for x in metrics.splitlines() if x.startswith(line)]
        return found[0] if found else 0.0


def built(stub_url: str, **given: Any) -> tuple[GatewayApp, HandMadeFleet, WordRouter]:
    settings = GatewaySettings(**{"target": "shop", "base": "stub-base", "keys": Keys.of([KEY]), **given})
    fleet, router = HandMadeFleet(ADAPTER, router=Router.always("refund")), WordRouter()
    gateway = Gateway(settings, HttpUpstream(Pool(Servers([stub_url])), "stub-base"), fleet, router)
    return GatewayApp(gateway), fleet, router


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, in the form that OpenAI's clients read."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@contextmanager
def run(**given: Any) -> Iterator[Running]:
    """A gateway with these settings, in front of a stub."""
    stub = Stub()
    with serving(stub.app) as behind:
        app, fleet, router = built(behind, **given)
        with serving(app) as url:
            yield Running(url, stub, fleet, app.gateway, router)


def signed(answer: httpx.Response) -> tuple[str, str, str]:
    """Release, router and adapter that an answer is signed with."""
    head = answer.headers
    return head["x-trace-release"], head.get("x-trace-router", ""), head["x-trace-adapter"]
