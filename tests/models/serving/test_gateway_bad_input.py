"""Bad input to the gateway over HTTP: the error bodies that OpenAI's clients read, and nothing else told."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from errors import ConfigurationError
from models.serving.gateway.keys import Keys
from models.serving.gateway.settings import check_host
from tests.models.serving.gateway_running import KEY, Running, built, error, run
from tests.models.serving.gateway_servers import Stub, serving


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Settings of the gateway are the parameter of an indirect parametrization."""
    with run(**getattr(request, "param", {})) as one:
        yield one


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{not json", 400, None),
        (b"[1]", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, None),
        ({"model": "trace"}, 400, "messages"),
        ({"model": "trace", "messages": []}, 400, "messages"),
        ({"model": "trace", "messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}]}, 400, "model"),
        ({"model": "trace", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "max_tokens"),
        ({"model": "trace", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400, "temperature"),
        ({"model": "trace", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools"),
        ({"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        ({"model": "../../etc", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        ({"model": "trace", "messages": [{"role": "user", "content": "long"}]}, 400, "messages"),
        ({"model": "trace", "messages": [{"role": "user", "content": "fail"}]}, 500, None),
        ({"model": "refund", "messages": [{"role": "user", "content": "liar"}]}, 502, None),
    ],
)
def test_bad_input_gets_the_error_body_that_clients_read(
    running: Running, body: Any, status: int, param: str | None
) -> None:
    refused = running.post(body)
    assert refused.status_code == status
    assert error(refused)["param"] == param
    assert "/secret" not in refused.text
    assert "Traceback" not in refused.text
    assert running.gateway.in_flight == 0
    assert running.chat("still there").status_code == 200


def test_official_client_gets_its_own_exceptions(running: Running) -> None:
    client = running.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="trace", messages=[{"role": "user", "content": "long"}])
    assert long.value.code == "context_length_exceeded"
    wrong = openai.OpenAI(base_url=f"{running.url}/v1", api_key="not-the-right-key-at-all", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        wrong.models.list()
    assert "not-the-right" not in str(refused.value)


def test_bodies_are_read_up_to_the_limit_only(running: Running) -> None:
    large = running.post(b" " * (10 << 20))
    assert (large.status_code, error(large)["code"]) == (413, "request_too_large")
    # Without a length, what comes is counted.
    host, port = running.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    parts = (b" " * (1 << 20) for _ in range(10))
    try:
        connection.request(
            "POST", "/v1/chat/completions", parts, {"authorization": f"Bearer {KEY}"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused before all of it was sent
    assert running.chat("still there").status_code == 200


def test_other_sites_and_paths(running: Running) -> None:
    assert error(running.chat("x", headers={"origin": "http://evil.example"}))["code"] == "foreign_origin"
    assert running.chat("x", headers={"origin": running.url}).status_code == 200
    assert httpx.get(f"{running.url}/v2/x", trust_env=False).status_code == 404
    assert httpx.get(f"{running.url}/v1/chat/completions", trust_env=False).status_code == 405
    for path in ("/v1/models", "/metrics", "/status"):
        assert error(httpx.get(f"{running.url}{path}", trust_env=False))["code"] == "invalid_api_key"
    assert httpx.get(f"{running.url}/health", trust_env=False).json() == {"status": "ok"}


def test_without_keys_only_this_machine_may_ask() -> None:
    with pytest.raises(ConfigurationError, match="without keys"):
        check_host("0.0.0.0", Keys())
    check_host("127.0.0.1", Keys())
    check_host("0.0.0.0", Keys.of([KEY]))
    with pytest.raises(ConfigurationError, match="fewer than"):
        Keys.of(["short"])
    both = Keys.read(None, SecretStr(f"{KEY}, {'x' * 20}"))
    assert len(both.digests) == 2
    assert both.who(f"Bearer {KEY}") is not None
    assert KEY not in repr(both)
    stub = Stub()
    with serving(stub.app) as behind:
        app, _, _ = built(behind, keys=Keys())
        with serving(app) as url:
            assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200
            foreign = httpx.get(f"{url}/v1/models", headers={"host": "rebound.example"}, trust_env=False)
            assert error(foreign)["code"] == "foreign_host"
