"""Stands for an OpenTelemetry collector: takes spans over HTTP, as protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from models.telemetry import tracing


class Collector:
    """What came: spans, and the services that sent them."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.url = ""

    def take(self, body: bytes) -> None:
        sent = ExportTraceServiceRequest.FromString(body)
        for part in sent.resource_spans:
            self.services |= {a.value.string_value for a in part.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in part.scope_spans for span in scope.spans]

    def named(self, name: str) -> Any:
        """The one span of this name, once all that were ended have come."""
        tracing.provider().force_flush()
        (found,) = (span for span in self.spans if span.name == name)
        return found


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@contextmanager
def collecting(monkeypatch: Any) -> Iterator[Collector]:
    """A collector that this process sends to."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tracing.provider.cache_clear()
    try:
        yield found
    finally:
        tracing.provider().shutdown()
        tracing.provider.cache_clear()
        server.shutdown()
        server.server_close()
