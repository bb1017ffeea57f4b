"""A stage in work is seen from outside: its log lines, its span and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.telemetry.metrics import METRICS
from models.telemetry.place import Place, here
from settings import load_settings
from tasks.round.context import Context
from tasks.round.results import SelectResult, SynthesizeResult
from tasks.round.stage import forget, open_context, stage
from tests.models.telemetry.otlp_receiver import attributes, collecting

SEEN: list[Place] = []


@stage("select")
def selected(context: Context) -> SelectResult:
    SEEN.append(here())
    return SelectResult(selected=[])


@stage("synthesize")
def broken(context: Context, capability: str) -> SynthesizeResult:
    SEEN.append(here())
    raise ValueError("broken")


def counted(name: str, outcome: str) -> float:
    return METRICS.registry.get_sample_value("trace_round_stages_total", {"stage": name, "outcome": outcome}) or 0.0


def test_a_stage_is_seen_from_outside(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    before = counted("select", "done"), counted("synthesize", "failed")
    with collecting(monkeypatch) as found:
        context = open_context(load_settings(profile="smoke", home=settings_folder / "home"))
        selected.do(context)
        selected.do(context)  # done already: it is not at work again
        with pytest.raises(ValueError, match="broken"):
            broken.do(context, "refund")
        forget(context.round.id)
        top, first, second = map(found.named, ("shop night 1", "select", "synthesize:refund"))
        assert {first.parent_span_id, second.parent_span_id} == {top.span_id}
        assert attributes(second) == {
            "trace.round": "1", "trace.stage": "synthesize", "trace.capability": "refund",
        }  # fmt: skip
    assert [Place("1", "select"), Place("1", "synthesize", "refund")] == SEEN
    assert here() == Place()
    assert (counted("select", "done"), counted("synthesize", "failed")) == (before[0] + 1, before[1] + 1)
    labels = {"target": "shop", "profile": "smoke"}
    assert METRICS.registry.get_sample_value("trace_round", labels) == 1
