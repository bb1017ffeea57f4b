"""What a round's process counts, and where Prometheus reads it."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import generate_latest

from models.telemetry.metrics import RoundMetrics, serve
from models.telemetry.place import Place
from tests.integration.servers import free_port


def row(purpose: str, success: bool | None) -> SimpleNamespace:
    return SimpleNamespace(purpose=purpose, success=success, prompt_tokens=10, sampled_tokens=3)


def figures(metrics: RoundMetrics) -> dict[str, float]:
    """Every line of the page that Prometheus reads."""
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


def test_episodes_stages_and_steps_are_counted() -> None:
    metrics = RoundMetrics()
    metrics.began(3, "shop", "laptop")
    place = Place("3", "train", "refund")
    with metrics.stage(place):
        assert figures(metrics)['trace_round_stage_working{capability="refund",stage="train"}'] == 1
        metrics.stored([row("training", True), row("training", False), row("training", None)])
        metrics.trained("refund", 4, 0.5, None)
    with pytest.raises(ValueError, match="no"), metrics.stage(Place("3", "gate")):
        raise ValueError("no")
    found = figures(metrics)
    assert found['trace_round{profile="laptop",target="shop"}'] == 3
    assert found['trace_round_stage_working{capability="refund",stage="train"}'] == 0
    assert found['trace_round_stages_total{outcome="done",stage="train"}'] == 1
    assert found['trace_round_stages_total{outcome="failed",stage="gate"}'] == 1
    assert found['trace_round_stage_seconds_count{stage="gate"}'] == 1
    for outcome in ("success", "failure", "lost"):
        assert found[f'trace_round_episodes_total{{outcome="{outcome}",purpose="training"}}'] == 1
    assert (found['trace_round_tokens_total{kind="prompt"}'], found['trace_round_tokens_total{kind="sampled"}']) == (
        30,
        9,
    )
    assert found['trace_round_training{capability="refund",figure="step"}'] == 4
    assert 'trace_round_training{capability="refund",figure="success"}' not in found
    assert found["trace_round_progress_timestamp_seconds"] > 1e9


def test_the_page_is_on_loopback_and_a_taken_port_is_said(caplog: pytest.LogCaptureFixture) -> None:
    metrics, port = RoundMetrics(), free_port()
    serve(0, metrics)
    serve(port, metrics)
    serve(port, metrics)  # the same process's next round
    assert "trace_round_progress" in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    assert caplog.text == ""
    with socket.socket() as taken, caplog.at_level(logging.WARNING, "trace"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serve(port, metrics)
    assert f"metrics_port = {port} cannot be listened on (Address already in use)" in caplog.text
