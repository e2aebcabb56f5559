"""Spans of a request over ingress, router and engine: where they hang, what they say, and that they can be left out."""

import builtins
import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from openai_harness import Rig, says

from warmroot.cluster.errors import ConfigError
from warmroot.cluster.ids import ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, FirstTokenReport, GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.router.engine_spans import EngineSpans
from warmroot.router.tracing import Tracing, tracing

otel = pytest.importorskip("opentelemetry.sdk.trace")
TRACE, PARENT = "a" * 32, "b" * 16
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
REPORT = FirstTokenReport(queue_s=0.25, prefill_s=0.5, router_s=0.125, predicted_tokens=3)


class Spans:
    """What a process would send."""

    def __init__(self, **options) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.memory, provider = InMemorySpanExporter(), otel.TracerProvider(**options)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.now_ns = 10**18
        self.tracing = Tracing(provider, lambda: self.now_ns)

    def finished(self) -> dict:
        return {span.name: span for span in self.memory.get_finished_spans()}


async def test_a_request_is_a_span_under_its_client_s_and_the_choice_one_under_it():
    spans = Spans()
    rig = Rig(says("Hello!", cached_tokens=4, report=REPORT), tracing=spans.tracing)
    body = {"model": "tiny", "prompt": "a secret", "max_tokens": 3}
    response = await rig.post("/v1/completions", body, headers={"traceparent": TRACEPARENT})
    assert response.status_code == 200
    served, route = spans.finished()["POST /v1/completions"], spans.finished()["route"]
    assert f"{served.context.trace_id:032x}" == TRACE
    assert f"{served.parent.span_id:016x}" == PARENT
    assert route.parent.span_id == served.context.span_id
    assert dict(served.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "warmroot.request_id": response.headers["x-request-id"],
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "warmroot.cached_tokens": 4,
        "warmroot.replica": "r0",
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert dict(route.attributes) == {"warmroot.predicted_tokens": 3, "warmroot.replica": "r0"}
    assert route.end_time - route.start_time == 125_000_000
    (sent,) = rig.generator.requests
    assert sent.trace == f"00-{TRACE}-{served.context.span_id:016x}-01"
    assert "secret" not in str([span.to_json() for span in spans.memory.get_finished_spans()])


async def test_probes_have_no_span_and_what_is_not_sampled_costs_the_replica_nothing():
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    spans = Spans(sampler=ALWAYS_OFF)
    rig = Rig(tracing=spans.tracing)
    async with rig.http() as client:
        await client.get("/health")
    await rig.complete("x")
    assert spans.finished() == {}
    assert rig.generator.requests[0].trace == ""


async def test_without_tracing_nothing_travels():
    rig = Rig()
    await rig.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers={"traceparent": TRACEPARENT})
    assert rig.generator.requests[0].trace == ""


def delta(number: int, finish: FinishReason | None = None, report: FirstTokenReport | None = None) -> TokenDelta:
    return TokenDelta(
        request_id=RequestId("r"), index=number, token_ids=[7], cached_tokens=2, finish_reason=finish, report=report
    )


def request(trace: str = TRACEPARENT) -> GenerateRequest:
    return GenerateRequest(request_id=RequestId("r"), prompt_token_ids=[1, 2, 3], params=SamplingParams(), trace=trace)


def test_a_replica_s_part_is_queue_prefill_and_decode():
    spans = Spans()
    engine = EngineSpans(spans.tracing, ReplicaId("a"))
    began = spans.now_ns
    engine.began(request())
    spans.now_ns += 750_000_000
    engine.saw([delta(0, report=REPORT)])
    spans.now_ns += 100_000_000
    engine.saw([delta(1, FinishReason.STOP)])
    queue, prefill, decode = (spans.finished()[name] for name in ("queue", "prefill", "decode"))
    assert (queue.start_time, queue.end_time) == (began, began + 250_000_000)
    assert (prefill.start_time, prefill.end_time) == (began + 250_000_000, began + 750_000_000)
    assert (decode.start_time, decode.end_time) == (began + 750_000_000, began + 850_000_000)
    assert {f"{span.parent.span_id:016x}" for span in (queue, prefill, decode)} == {PARENT}
    assert dict(prefill.attributes) == {
        "warmroot.replica": "a",
        "gen_ai.usage.input_tokens": 3,
        "warmroot.cached_tokens": 2,
    }
    assert decode.attributes["gen_ai.usage.output_tokens"] == 2
    assert decode.attributes["warmroot.finish_reason"] == "stop"


def test_what_is_aborted_ends_its_spans_once():
    spans = Spans()
    engine = EngineSpans(spans.tracing, ReplicaId("a"))
    engine.began(request())
    engine.ended(RequestId("r"))
    engine.ended(RequestId("r"))
    engine.saw([delta(0, FinishReason.STOP)])
    assert list(spans.finished()) == ["queue"]
    assert spans.finished()["queue"].attributes["warmroot.finish_reason"] == "abort"


def test_a_replica_keeps_nothing_of_what_is_not_traced():
    spans = Spans()
    engine = EngineSpans(spans.tracing, ReplicaId("a"))
    engine.began(request(trace=""))
    engine.saw([delta(0, FinishReason.STOP, REPORT)])
    assert spans.finished() == {}


def test_nothing_is_traced_unless_an_endpoint_is_named():
    assert tracing(None, "s", {}) is None
    disabled = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert tracing("http://127.0.0.1:1/v1/traces", "s", disabled) is None


def test_missing_packages_are_named(monkeypatch, caplog):
    find = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"warmroot\[otel\]"):
        tracing("http://127.0.0.1:1/v1/traces", "s", {})
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    assert tracing(None, "s", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None


def test_spans_reach_a_collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        traces = tracing(f"http://127.0.0.1:{server.server_port}/v1/traces", "warmroot-test", {})
        assert traces is not None
        traces.record("prefill", TRACEPARENT, {"warmroot.replica": "a"}, start_ns=1, seconds=0.5)
        traces.close()
    finally:
        server.shutdown()
        server.server_close()
    (resource,) = ExportTraceServiceRequest.FromString(bodies[0]).resource_spans
    assert "warmroot-test" in [attribute.value.string_value for attribute in resource.resource.attributes]
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("prefill", TRACE, PARENT)
