"""OpenTelemetry tracing: a span per request, with a child span per stage. Needs the extra ``otel``.

OpenTelemetry's own variables configure exporter and sampling: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``,
``OTEL_TRACES_SAMPLER``, …
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from service.observability.metrics import STAGES, route_template

_PROPAGATOR = TraceContextTextMapPropagator()


class Traces:
    """Creates spans and exports them from a background thread until :meth:`close`."""

    def __init__(self) -> None:
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "fxserve")})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("fxserve")

    @contextmanager
    def request(self, scope: Scope) -> Iterator[trace.Span]:
        """Open a request's span, as a child of the span in its ``traceparent``.

        Call :meth:`responded` before it ends.
        """
        sent = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"] if key in _HEADERS}
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "fxserve.request_id": scope["request_id"],
        }
        context = _PROPAGATOR.extract(sent)
        with self._tracer.start_as_current_span(scope["method"], context, SpanKind.SERVER, attributes) as span:
            yield span

    def responded(self, span: trace.Span, scope: Scope, status: int, key: str | None) -> None:
        """Set the route, the status and the name of the API key of a request's span."""
        route = route_template(scope)
        span.update_name(f"{scope['method']} {route}")
        span.set_attributes({"http.route": route, "http.response.status_code": status})
        if key is not None:
            span.set_attribute("enduser.id", key)
        if status >= 500 or not status:
            span.set_status(Status(StatusCode.ERROR))

    def stages(self, milliseconds: Mapping[str, float]) -> None:
        """Add child spans for the current request's stages, consecutive and ending now."""
        end = time.time_ns()
        spent = {stage: int(milliseconds.get(stage, 0.0) * 1e6) for stage in STAGES}
        start = end - sum(spent.values())
        for stage, nanoseconds in spent.items():
            self._tracer.start_span(stage, start_time=start).end(start + nanoseconds)
            start += nanoseconds

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


_HEADERS = (b"traceparent", b"tracestate")
