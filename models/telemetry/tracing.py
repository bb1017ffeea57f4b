"""Spans for OpenTelemetry, sent to the endpoint that `OTEL_EXPORTER_OTLP_ENDPOINT` (or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) names; without one nothing is imported and nothing is sent.

The exporter's other variables hold too (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, ...). The provider is this
project's own: MLflow and Prefect have theirs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class NoSpan:
    """Stands for a span where none is wanted."""

    def set_attribute(self, name: str, value: Any) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


NONE = NoSpan()


def configured() -> bool:
    """Whether spans are sent anywhere."""
    return any(os.environ.get(name) for name in ENDPOINTS)


@cache
def provider() -> Any:
    """The provider of this process, which sends in the background and, at the end of the process, what is left."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "trace-agent"}
    made = TracerProvider(resource=Resource.create(named))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def begin(name: str, attributes: Mapping[str, Any]) -> Any:
    """A span that whoever asked for it ends; it is the parent of spans that are given it."""
    return provider().get_tracer("trace").start_span(name, attributes=dict(attributes)) if configured() else NONE


@contextlib.contextmanager
def span(
    name: str, attributes: Mapping[str, Any], parent: Any = NONE, headers: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """A span around the block, marked as failed by an error that leaves it. Its parent is the span `parent`, or the
    caller's that the W3C header `traceparent` among `headers` names; else it begins a trace."""
    if not configured():
        yield NONE
        return
    from opentelemetry.trace import SpanKind, set_span_in_context

    context = None if parent is NONE else set_span_in_context(parent)
    kind = SpanKind.INTERNAL
    if headers is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        kind, context = SpanKind.SERVER, TraceContextTextMapPropagator().extract(dict(headers))
    tracer = provider().get_tracer("trace")
    with tracer.start_as_current_span(name, context, kind, attributes=dict(attributes)) as made:
        yield made
