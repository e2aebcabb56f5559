"""OpenTelemetry spans of a process: none, at no cost, unless an endpoint for them is configured.

Whoever makes spans here gives their times, so that what is known only afterwards, such as the wait in a replica, can
still become one. The extra ``otel`` brings the packages; nothing else imports them.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..cluster.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MISSING = "traces need packages that are not installed: pip install 'warmroot[otel]'"

logger = logging.getLogger(__name__)


class Tracing:
    """Makes spans of ``provider``; ``now_ns`` is the wall clock in nanoseconds."""

    def __init__(self, provider: "TracerProvider", now_ns: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.now_ns = now_ns
        self._provider = provider
        self._tracer = provider.get_tracer("warmroot")
        self._server = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()

    def serve(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> "Span":
        """Begin the span of a request from outside, under what its ``traceparent`` names."""
        context = self._propagator.extract(headers)
        return self._tracer.start_span(name, context, self._server, attributes, start_time=self.now_ns())

    def record(self, name: str, parent: str, attributes: Mapping[str, Any], *, start_ns: int, seconds: float) -> None:
        """A span that is over, under the ``traceparent`` of another one."""
        context = self._propagator.extract({"traceparent": parent})
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        span.end(start_ns + round(seconds * 1e9))

    def traceparent(self, span: "Span") -> str:
        """How others name a span that is recorded; empty for one that is not."""
        if not span.is_recording():
            return ""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def close(self) -> None:
        """Send what waits, and end."""
        self._provider.shutdown()


def tracing(endpoint: str | None, service: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Traces to ``endpoint``, or to where OpenTelemetry's variables say; None where neither is given.

    Raises ConfigError if ``endpoint`` is given and the packages are missing; variables, which platforms set for all
    that they run, are then passed over with a warning.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None and not any(environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if endpoint is not None:
            raise ConfigError(f"otlp_traces_endpoint: {_MISSING}", param="otlp_traces_endpoint") from None
        logger.warning("OTEL_* variables name an endpoint, but %s", _MISSING)
        return None
    names = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(names))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Tracing(provider)
