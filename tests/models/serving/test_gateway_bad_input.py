"""Bad input to the gateway over HTTP: the error bodies that OpenAI's clients read, and nothing else told."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from errors import ConfigurationError
from models.serving.gateway.keys import Keys
from models.serving.gateway.settings import check_host
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import parse_chat, parse_completion, refuse_unsupported, to_messages
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
        ({"model": "trace", "messages": [{"role": "user", "content": "x"}], "stream": "false"}, 400, "stream"),
        (
            {"model": "trace", "messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": 1}},
            400,
            "stream_options.include_usage",
        ),
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


SAID = {"role": "user", "content": "x"}


def deep(levels: int) -> Any:
    """A JSON value of so many levels."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "parameters": parameters}}


def test_bodies_that_parse_and_cannot_be_used_are_refused_by_name(running: Running) -> None:
    for change, param, words in (
        ({"messages": [{"role": []}]}, "messages[0].role", "has role []"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
        ({"user": {"\udfff": 1}}, None, "surrogate"),
        ({"metadata": deep(500)}, None, "100 levels"),
        ({"tools": [tool(None), tool([])]}, "tools[1].function.parameters", "is []"),
        ({"tools": [tool({"properties": {"a": 5}})]}, "tools[0].function.parameters", "'a': 5"),
        ({"tools": [tool({"properties": {"a": {"anyOf": 1}}})]}, "tools[0].function.parameters", "'anyOf': 1"),
        ({"metadata": {"score": float("nan")}}, None, "NaN"),
        ({"temperature": float("inf")}, None, "too large"),
    ):
        refused = running.post({"model": "trace", "messages": [SAID], **change})
        assert (refused.status_code, error(refused)["param"]) == (400, param), change
        assert words in error(refused)["message"]
    raw = b'{"model": "trace", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'
    for refused in (running.post(raw), running.post({"conversation": "\ud800", "success": True}, "/v1/feedback")):
        assert (refused.status_code, "surrogate" in error(refused)["message"]) == (400, True)
    choice = {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, True]}]}
    kept = [tool(None), tool({"properties": None}), tool({"properties": {"a": choice, "b": True}})]
    assert running.chat("x", tools=kept).status_code == 200


def test_stop_texts_that_cost_too_much_after_each_token_are_refused(running: Running) -> None:
    for stop in (["a", "b", "c", "d", "e"], "x" * 1000, ["x", "y" * 257]):
        refused = running.chat("x", stop=stop)
        assert (refused.status_code, error(refused)["param"]) == (400, "stop")
        assert "at most 4 of at most 256 characters" in error(refused)["message"]
    assert running.chat("x", stop=["a", "b", "c", "d" * 256]).status_code == 200


def test_what_a_client_asks_for_in_vain_is_refused_by_name_where_prompts_are_rendered() -> None:
    """Also what servers take beside OpenAI's own: it would be answered as if it had not been asked."""
    body = {"model": "trace", "messages": [SAID]}
    function = {"name": "find", "parameters": {}}
    for name, asked, nothing in (
        ("top_p", 0.5, 1),
        ("top_k", 20, -1),
        ("min_p", 0.1, 0),
        ("repetition_penalty", 1.2, 1.0),
        ("functions", [function], []),
        ("function_call", {"name": "find"}, "auto"),
        ("guided_json", {"type": "object"}, None),
        ("guided_choice", ["yes", "no"], None),
        ("structured_outputs", {"regex": "a+"}, {}),
        ("stop_token_ids", [7], []),
        ("min_tokens", 5, 0),
        ("prompt_logprobs", 0, None),
        ("include_stop_str_in_output", True, False),
        ("truncate_prompt_tokens", 5, None),
        ("length_penalty", 2, 1.0),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
        ("continue_final_message", True, False),
        ("structural_tag", "{}", None),
    ):
        with pytest.raises(ApiError, match=f"^{name} is not supported where the gateway renders") as refused:
            refuse_unsupported(parse_chat({**body, name: asked}))
        assert (refused.value.status, refused.value.param) == (400, name)
        refuse_unsupported(parse_chat({**body, name: nothing}))
    refuse_unsupported(parse_chat({**body, "logprobs": False, "top_logprobs": 0}))
    for count in (0, 1):  # of a text completion: the sampled tokens' own, and as many others
        with pytest.raises(ApiError, match=r"^logprobs is not supported"):
            refuse_unsupported(parse_completion({"model": "trace", "prompt": "x", "logprobs": count}))
    refuse_unsupported(parse_completion({"model": "trace", "prompt": "x", "logprobs": False}))
    for asked in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "json_object"):
        with pytest.raises(ApiError, match=r"^response_format can be text only"):
            refuse_unsupported(parse_chat({**body, "response_format": asked}))
    refuse_unsupported(parse_chat({**body, "response_format": {"type": "text"}}))


@pytest.mark.parametrize(
    "calls",
    [
        5,
        [{"function": {"name": "find", "arguments": "[" * 100_000}}],
        [{"function": {"name": "find", "arguments": json.dumps({"a": deep(500)})}}],
        [{"function": {"name": "find", "arguments": '{"a": "\\ud800"}'}}],
    ],
)
def test_calls_of_a_client_that_are_none_are_refused_where_they_are_read(calls: Any) -> None:
    with pytest.raises(ApiError, match="calls") as refused:
        to_messages([SAID, {"role": "assistant", "tool_calls": calls}])
    assert (refused.value.status, refused.value.param) == (400, "messages[1].tool_calls")


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
    for path in ("/v1/models", "/health"):
        malformed = httpx.get(f"{running.url}{path}", headers={"origin": "http://["}, trust_env=False)
        assert (malformed.status_code, "'http://['" in error(malformed)["message"]) == (400, True)
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
            malformed = httpx.get(f"{url}/health", headers={"host": "["}, trust_env=False)
            assert (malformed.status_code, "'['" in error(malformed)["message"]) == (400, True)
