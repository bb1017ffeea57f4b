"""An episode as a trace in MLflow: a span for the episode, and below it one for each turn and tool call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Hexadecimal digits of a trace's id.
_DIGITS = 32


@dataclass(frozen=True)
class PlayedSpan:
    """A turn of the agent (`LLM`) or what a tool answered (`TOOL`), with what went in and what came out."""

    name: str
    kind: str
    inputs: Any
    outputs: Any
    milliseconds: float


@dataclass(frozen=True)
class PlayedTrace:
    """One episode. `key` makes its id, so that the same episode is the same trace whenever it is logged; `session`
    groups episodes; `ended` is in nanoseconds since 1970; `failed` for one that was lost to the infrastructure."""

    key: str
    name: str
    inputs: Any
    outputs: Any
    spans: tuple[PlayedSpan, ...]
    tags: Mapping[str, str]
    session: str
    ended: int
    seconds: float
    failed: bool = False

    @property
    def id(self) -> str:
        """The trace's id in MLflow."""
        return f"tr-{hashlib.sha256(self.key.encode()).hexdigest()[:_DIGITS]}"


def spans_of(trace: PlayedTrace) -> Iterator[Any]:
    """The spans of a trace as MLflow's entities, the episode's own first. A stored episode knows how long tools took to
    answer, not when: they are laid one after another, up to its end."""
    from mlflow.entities import Span

    length = max(trace.seconds, sum(s.milliseconds for s in trace.spans) / 1000, 1e-3)
    began = trace.ended - int(length * 1e9)
    whole = PlayedSpan(trace.name, "AGENT", trace.inputs, trace.outputs, 1000 * length)
    tags = {"mlflow.traceName": trace.name, **trace.tags}
    about = {"session.id": trace.session} | {f"mlflow.traceTag.{key}": value for key, value in tags.items()}
    yield Span.from_dict(_span(trace, 0, whole, began, about))
    at = began
    for number, span in enumerate(trace.spans, 1):
        yield Span.from_dict(_span(trace, number, span, at, {}))
        at += int(span.milliseconds * 1e6)


def _span(trace: PlayedTrace, number: int, span: PlayedSpan, began: int, about: Mapping[str, str]) -> dict[str, Any]:
    """A span in the form that MLflow reads; number 0 is the episode's own. Attributes are JSON."""
    attributes: dict[str, Any] = {
        "mlflow.traceRequestId": trace.id,
        "mlflow.spanType": span.kind,
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        **about,
    }
    failed = trace.failed and not number
    return {
        "trace_id": trace.id,
        "span_id": f"{number + 1:016x}",
        "parent_span_id": f"{1:016x}" if number else None,
        "name": span.name,
        "start_time_unix_nano": began,
        "end_time_unix_nano": began + int(span.milliseconds * 1e6),
        "status": {"code": "STATUS_CODE_ERROR" if failed else "STATUS_CODE_OK"},
        "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
    }
