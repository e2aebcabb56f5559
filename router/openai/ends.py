"""What is told of a request when it has ended: a count, a line of the request log, a span. Never what was said."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from ..json_lines import JsonLines
from ..metrics import RequestMeter, RequestMetrics
from ..tracing import Tracing
from .middleware_access import OPEN_PATHS
from .record import RequestRecord
from .scopes import path_of

OTHER_ROUTE = "other"


class RequestEnds:
    """Told of the beginning and the end of every HTTP request.

    ``clock`` is the wall clock in seconds. Without ``log`` and ``tracing`` requests are only counted.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        *,
        log: JsonLines | None = None,
        tracing: Tracing | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._responses = metrics.responses
        self._log = log
        self._tracing = tracing
        self._clock = clock

    def began(self, scope: Scope) -> None:
        """Begin its span."""
        path = path_of(scope)
        if self._tracing is not None and path not in OPEN_PATHS:
            record: RequestRecord = scope["state"]["record"]
            attributes = {"http.request.method": scope["method"]}
            record.span = self._tracing.serve(scope["method"], Headers(scope=scope), attributes)
            record.trace = self._tracing.traceparent(record.span)

    def ended(self, scope: Scope, duration_s: float) -> None:
        """``duration_s`` after its beginning, well or not."""
        record: RequestRecord = scope["state"]["record"]
        route = _route(scope)
        self._responses.labels(route, str(record.status)).inc()
        if self._log is not None and path_of(scope) not in OPEN_PATHS:
            began = datetime.fromtimestamp(self._clock() - duration_s, timezone.utc)
            self._log.add(
                {"time": began.isoformat(timespec="milliseconds"), **_entry(scope, record, route, duration_s)}
            )
        if record.span is not None and self._tracing is not None:
            self._end_span(self._tracing, scope, record, route)

    def _end_span(self, tracing: Tracing, scope: Scope, record: RequestRecord, route: str) -> None:
        span, now_ns = record.span, tracing.now_ns()
        if span is None or not span.is_recording():
            return
        span.update_name(f"{scope['method']} {route}")
        span.set_attributes(_attributes(scope, record, route))
        if record.status >= 500:
            from opentelemetry.trace import StatusCode

            span.set_status(StatusCode.ERROR)
        for meter in record.meters:
            if meter.first is not None and meter.first.report is not None:
                report, age_s = meter.first.report, meter.age_s()
                facts = {"warmroot.predicted_tokens": report.predicted_tokens, "warmroot.replica": meter.first.replica}
                start_ns = now_ns - round(age_s * 1e9)
                tracing.record("route", record.trace, facts, start_ns=start_ns, seconds=report.router_s)
        span.end(now_ns)


def _route(scope: Scope) -> str:
    """As the API knows it; what it does not know is one route, whatever was asked for."""
    return getattr(scope.get("route"), "path", OTHER_ROUTE)


def _entry(scope: Scope, record: RequestRecord, route: str, duration_s: float) -> dict[str, Any]:
    usage = None if record.usage is None else record.usage()
    entry = {
        "request_id": scope["state"]["request_id"],
        "trace": record.trace,
        "route": route,
        "status": record.status,
        "model": record.model,
        "replica": record.replica,
        "prompt_tokens": usage and usage.prompt_tokens,
        "completion_tokens": usage and usage.completion_tokens,
        "cached_tokens": usage and usage.cached_tokens,
        "duration_s": round(duration_s, 6),
    }
    return {**entry, **_times(record.meters[0])} if record.meters else entry


def _times(meter: RequestMeter) -> dict[str, Any]:
    """Of a request's first prompt."""
    facts: dict[str, Any] = {"finish_reason": ",".join(dict.fromkeys(meter.finish_reasons)) or None}
    first_token_s, report = meter.first_token_s, meter.first and meter.first.report
    if first_token_s is not None:
        facts["first_token_s"] = round(first_token_s, 6)
    if report is not None:
        facts["predicted_tokens"] = report.predicted_tokens
        facts["router_s"] = round(report.router_s, 6)
        facts["queue_s"] = round(report.queue_s, 6)
        facts["prefill_s"] = round(report.prefill_s, 6)
    return facts


def _attributes(scope: Scope, record: RequestRecord, route: str) -> dict[str, Any]:
    """By OpenTelemetry's names where it has some."""
    attributes: dict[str, Any] = {
        "http.route": route,
        "http.response.status_code": record.status,
        "warmroot.request_id": scope["state"]["request_id"],
    }
    if record.usage is not None:
        usage = record.usage()
        attributes["gen_ai.request.model"] = record.model
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["warmroot.cached_tokens"] = usage.cached_tokens
        attributes["warmroot.replica"] = record.replica
    if record.meters:
        reasons = tuple(reason for meter in record.meters for reason in meter.finish_reasons)
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes
