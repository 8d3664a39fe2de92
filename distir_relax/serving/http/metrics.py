"""Metrics of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distir_relax.serving.engine import Engine
from distir_relax.serving.http.replicas import Replicas
from distir_relax.serving.request import GenerationRequest

_LATENCIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Counters and distributions of requests, and the load of the engines when it is read."""

    def __init__(self, replicas: Replicas) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "distir"}
        self._requests = Counter("requests", "Requests by how they ended", ["end"], **made)
        self._refused = Counter("refused_requests", "Requests that were refused, by status", ["status"], **made)
        self._prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **made)
        self._tokens = Counter("generated_tokens", "Tokens that were generated", **made)
        self._first = Histogram(
            "time_to_first_token_seconds", "From a request to its first token", buckets=_LATENCIES, **made
        )
        self._between = Histogram(
            "time_per_token_seconds", "Between two tokens of a request", buckets=_LATENCIES, **made
        )
        gauges: dict[str, tuple[str, Callable[[Engine], int]]] = {
            "running_requests": ("Requests in the next step", lambda e: e.running),
            "waiting_requests": ("Requests that wait", lambda e: e.waiting),
            "reserved_tokens": ("Tokens that memory is set aside for", lambda e: e.reserved_tokens),
            "steps": ("Steps since the engine was started", lambda e: e.steps),
        }
        for name, (text, read) in gauges.items():
            gauge = Gauge(name, text, **made)
            gauge.set_function(partial(replicas.total, read))
        Gauge("ready", "Whether requests are taken", **made).set_function(lambda: float(replicas.is_ready))
        Gauge("restarts", "Restarts of the engine", **made).set_function(lambda: float(replicas.restarts))

    def refused(self, status: int) -> None:
        """Count a request that was refused."""
        self._refused.labels(str(status)).inc()

    def ended(self, request: GenerationRequest) -> None:
        """Count a request that has ended, with its tokens and times."""
        self._requests.labels(request.ended).inc()
        self._prompt_tokens.inc(len(request.prompt))
        self._tokens.inc(len(request.tokens))
        if request.times:
            self._first.observe(request.times[0] - request.submitted)
        for before, after in zip(request.times, request.times[1:], strict=False):
            self._between.observe(after - before)

    def text(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its media type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        body: Any = generate_latest(self.registry)
        return body, CONTENT_TYPE_LATEST
