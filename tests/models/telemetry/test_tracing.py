"""Spans reach the collector that the environment names, and cost nothing where none is named."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from models.telemetry import tracing
from tests.models.serving.gateway_running import run
from tests.models.telemetry.otlp_receiver import attributes, collecting

STATUS_ERROR, SERVER = 2, 2


def test_without_an_endpoint_nothing_is_imported_and_nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    code = (
        "import sys; from models.telemetry import tracing\n"
        "with tracing.span('a', {}, tracing.begin('b', {})) as s: s.set_attribute('x', 1)\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_stages_lie_under_their_round_and_say_that_they_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as found:
        whole = tracing.begin("shop night 3", {"trace.round": 3})
        with tracing.span("rollout", {"trace.stage": "rollout"}, whole) as inside:
            inside.set_attribute("episodes", 7)
        with pytest.raises(ValueError, match="no"), tracing.span("train", {}, whole):
            raise ValueError("no")
        whole.end()
        rollout, train, top = (found.named(name) for name in ("rollout", "train", "shop night 3"))
        assert attributes(rollout) == {"trace.stage": "rollout", "episodes": 7}
        assert attributes(top) == {"trace.round": 3}
        assert {rollout.parent_span_id, train.parent_span_id} == {top.span_id}
        assert {rollout.trace_id, train.trace_id} == {top.trace_id}
        assert (train.status.code, rollout.status.code) == (STATUS_ERROR, 0)
        assert found.services == {"trace-agent"}


def test_a_request_to_the_gateway_goes_on_with_the_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collecting(monkeypatch) as found, run() as running:
        running.chat("refund 7", headers={"traceparent": f"00-{trace}-{parent}-01"})
        httpx.get(f"{running.url}/v1/models", trust_env=False)
        asked, refused = found.named("POST /v1/chat/completions"), found.named("GET /v1/models")
        assert (asked.trace_id.hex(), asked.parent_span_id.hex(), asked.kind) == (trace, parent, SERVER)
        told = attributes(asked)
        assert told["http.response.status_code"] == 200
        assert (told["trace.capability"], told["trace.adapter"]) == ("refund", "refund@v1-aaaaaaaa")
        assert attributes(refused)["http.response.status_code"] == 401
        assert "refund 7" not in str(asked), "what users say is in no span"
