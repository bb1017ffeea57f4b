"""What the gateway counts, in Prometheus' text form, and the same figures for its own page."""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from models.serving.fleet.lifecycle import ServedAdapter
from models.serving.fleet.releases import Standing

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
LONGEST_REASON = 300
# Decisions behind the page's figure of the router's confidence.
RECENT = 500


class Metrics:
    """One gateway's figures. Labels come from names that are served here, never from what a client sent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"trace_gateway_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"trace_gateway_{name}", text, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Requests by path and status", ("path", "status"))
        self.keys = counter("key_requests", "Requests by the name of their key", ("key", "outcome"))
        self.answers = counter("answers", "Answers by the model that gave them", ("model",))
        self.routes = counter("routes", "Decisions by capability (none: the base)", ("capability", "mode"))
        self.missing = counter("missing_adapter", "Requests whose adapter was not live", ("capability", "policy"))
        self.tokens = counter("tokens", "Tokens read and sampled", ("kind",))
        self.cancelled = counter("cancelled", "Requests that clients left before the answer")
        self.feedback = counter("feedback", "Feedback by outcome", ("outcome",))
        self.stored = counter("stored_conversations", "Turns after which a conversation was written to the store")
        self.dropped = counter(
            "dropped_conversations", "Turns after which none was written, as the store was slow or failed"
        )
        self.seconds = histogram("request_seconds", "Seconds until a request was answered whole", SECONDS)
        self.routing = histogram("routing_seconds", "Seconds that a routing decision took", SECONDS)
        self.confidence = histogram("route_confidence", "Probability of the class that was chosen", SHARES)
        self.in_flight = Gauge("trace_gateway_in_flight", "Requests being answered", registry=self.registry)
        self.live = Gauge(
            "trace_gateway_adapter_live", "1 while an adapter is live", ("adapter",), registry=self.registry
        )
        self.release = Gauge(
            "trace_gateway_release", "Number of the release that is served (0: the base alone)", registry=self.registry
        )
        self.release_since = Gauge(
            "trace_gateway_release_since_seconds", "Unix time at which it was swapped in", registry=self.registry
        )
        self.member = Gauge(
            "trace_gateway_release_member", "1 for each member", ("capability", "adapter"), registry=self.registry
        )
        self.not_served = Gauge(
            "trace_gateway_release_not_served",
            "1 while the release that is live cannot be served, with the reason",
            ("release", "reason"),
            registry=self.registry,
        )
        self.share: Counts[str] = Counts()
        self.recent: deque[float] = deque(maxlen=RECENT)

    def answered(self, model: str) -> None:
        """One whole answer by `model`."""
        self.answers.labels(model).inc()
        self.share[model] += 1

    def computed(self, prompt: int, completion: int) -> None:
        """Tokens of an answer, or of what a client has had of one."""
        self.tokens.labels("prompt").inc(prompt)
        self.tokens.labels("completion").inc(completion)

    def routed(self, capability: str, mode: str, milliseconds: float, confidence: float) -> None:
        """One decision of the router."""
        self.routes.labels(capability or "none", mode).inc()
        self.routing.observe(milliseconds / 1000)
        self.confidence.observe(confidence)
        self.recent.append(confidence)

    def logged(self, what: str) -> None:
        """A conversation was "stored" or "dropped"."""
        (self.stored if what == "stored" else self.dropped).inc()

    def served(self, standing: Standing, adapters: Sequence[ServedAdapter]) -> None:
        """What is served now; what was before leaves no row."""
        serving = standing.serving
        for rows in (self.live, self.member, self.not_served):
            rows.clear()
        for adapter in adapters:
            self.live.labels(adapter.name).set(adapter.state == "live")
        self.release.set(serving.number)
        self.release_since.set(serving.since)
        for capability, name in serving.members.items():
            self.member.labels(capability, name).set(1)
        if standing.problem:
            self.not_served.labels(str(standing.wanted), standing.problem[:LONGEST_REASON]).set(1)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
