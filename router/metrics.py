"""Prometheus metrics of an ingress: ``vllm:*`` names for requests and replicas, ``warmroot:*`` for routing.

Counters and histograms are fed request by request; what the cluster knows is read at scrape time. The label
``engine`` is the replica's id. vLLM's dashboards and the Gateway API's endpoint picker read these names.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..cluster.sampling_params import SamplingParams
from .cluster_metrics import LABELS, ReplicaCollector, RouterCollector
from .openai.cluster_state import ClusterState
from .output import OutputDelta
from .scaling_metrics import ScalingCollector

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
PART_BUCKETS = (0.01, 0.05, *E2E_BUCKETS)
"""Of the parts that a request's time has."""
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
N_BUCKETS = (1, 2, 5, 10, 20)
SOURCES = ("local_compute", "local_cache_hit")
KEPT_SCRAPES = 60
"""What was counted of a replica that is gone is exported so often, and then forgotten: names of replicas never end."""
_Kind = TypeVar("_Kind", Counter, Histogram)


class RequestMetrics:
    """The collectors of one application.

    ``ingress`` names it where there are several: the label of all that it counts or sees by itself. What replicas say
    of themselves has no such label, for every ingress exports the same.
    """

    def __init__(self, cluster: ClusterState, ingress: str = "") -> None:
        self.registry = CollectorRegistry()
        """Of what is read when Prometheus asks; others may register what the ingress sees."""
        self._counted = CollectorRegistry()
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Time to first token", TTFT_BUCKETS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Time between deltas", ITL_BUCKETS)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time from token to token of a sequence", ITL_BUCKETS
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Time to the last token", E2E_BUCKETS)
        self.queue_time = self._part("queue", "Time that a request waits in its replica")
        self.prefill_time = self._part("prefill", "Time from a request's first step to its first token")
        self.decode_time = self._part("decode", "Time from the first token to the last one")
        self.inference_time = self._part("inference", "Time from a request's first step to its last token")
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS)
        self.request_output_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence", TOKEN_BUCKETS
        )
        self.request_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached", TOKEN_BUCKETS
        )
        self.params_n = self._histogram("request_params_n", "Sequences that a request asks for", N_BUCKETS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Tokens that a request asks for at most, if it says so", TOKEN_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was in the cache")
        self.tokens_by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by where KV came from", "source"
        )
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.ended = self._counter(
            "request_success", "Sequences that ended after their first token, by reason", "finished_reason"
        )
        self.responses = Counter(
            "warmroot:http_responses", "Responses by route and status", ("route", "status"), registry=self._counted
        )
        self.registry.register(RouterCollector(cluster))
        self._known = CollectorRegistry()
        self._known.register(ReplicaCollector(cluster))
        self._known.register(ScalingCollector(cluster))
        self._known.register(_OfIngress(self.registry, ingress))
        self._own = _OfIngress(self._counted, ingress)
        self._cluster = cluster
        self._of: dict[tuple[str, str], ReplicaMetrics] = {}

    def of(self, model: str, engine: str) -> "ReplicaMetrics":
        """Those of one replica. Looking a metric up by its labels costs more than counting."""
        found = self._of.get((model, engine))
        if found is None:
            found = self._of[model, engine] = ReplicaMetrics(self, model, engine)
        return found

    def exposition(self) -> bytes:
        """Prometheus text format 0.0.4."""
        self._forget_gone()
        return generate_latest(_Families(self._known.collect(), self._own))

    async def scrape(self) -> bytes:
        """``exposition``, most of it by a thread: for hundreds of replicas it takes longer than tokens may wait."""
        self._forget_gone()
        known = list(self._known.collect())
        return await asyncio.to_thread(generate_latest, _Families(known, self._own))

    def _forget_gone(self) -> None:
        there = {replica.info.replica for replica in self._cluster.replicas()}
        for key, one in list(self._of.items()):
            one.num_absent = 0 if key[1] in there else one.num_absent + 1
            if one.num_absent > KEPT_SCRAPES:
                one.forget()
                del self._of[key]

    def _part(self, name: str, text: str) -> Histogram:
        return self._histogram(f"request_{name}_time_seconds", text, PART_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, LABELS, registry=self._counted, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=self._counted)


class ReplicaMetrics:
    """The metrics of one replica's requests."""

    def __init__(self, metrics: RequestMetrics, *labels: str) -> None:
        self.num_absent = 0
        """Scrapes since the replica was there."""
        self._labels = labels
        self._children: list[tuple[Counter | Histogram, tuple[str, ...]]] = []
        self.time_to_first_token = self._child(metrics.time_to_first_token)
        self.inter_token_latency = self._child(metrics.inter_token_latency)
        self.time_per_output_token = self._child(metrics.time_per_output_token)
        self.e2e_latency = self._child(metrics.e2e_latency)
        self.queue_time = self._child(metrics.queue_time)
        self.prefill_time = self._child(metrics.prefill_time)
        self.decode_time = self._child(metrics.decode_time)
        self.inference_time = self._child(metrics.inference_time)
        self.request_prompt_tokens = self._child(metrics.request_prompt_tokens)
        self.request_output_tokens = self._child(metrics.request_output_tokens)
        self.request_computed_tokens = self._child(metrics.request_computed_tokens)
        self.params_n = self._child(metrics.params_n)
        self.params_max_tokens = self._child(metrics.params_max_tokens)
        self.looked_up = [self._child(metric) for metric in (metrics.prompt_tokens, metrics.cache_queries)]
        self.cached = [self._child(metric) for metric in (metrics.cached_tokens, metrics.cache_hits)]
        self.by_source = [self._child(metrics.tokens_by_source, source) for source in SOURCES]
        self.generation_tokens = self._child(metrics.generation_tokens)
        self._ended = metrics.ended
        self._by_reason: dict[str, Counter] = {}

    def began(self, num_prompt_tokens: int, cached_tokens: int, params: SamplingParams) -> None:
        """Count a prompt that got its first token."""
        for counter in self.looked_up:
            counter.inc(num_prompt_tokens)
        for counter in self.cached:
            counter.inc(cached_tokens)
        num_computed = max(0, num_prompt_tokens - cached_tokens)
        computed, from_cache = self.by_source
        computed.inc(num_computed)
        from_cache.inc(cached_tokens)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_computed_tokens.observe(num_computed)
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

    def ended(self, reason: str) -> None:
        """Count a sequence that ended."""
        counter = self._by_reason.get(reason)
        if counter is None:
            counter = self._by_reason[reason] = self._child(self._ended, reason)
        counter.inc()

    def forget(self) -> None:
        """Export them no more."""
        for metric, labels in self._children:
            metric.remove(*labels)

    def _child(self, metric: _Kind, *more: str) -> _Kind:
        self._children.append((metric, (*self._labels, *more)))
        return metric.labels(*self._labels, *more)


class RequestMeter:
    """Watches the deltas of one prompt. ``clock`` is monotonic, in seconds."""

    def __init__(self, metrics: RequestMetrics, model: str, clock: Callable[[], float], params: SamplingParams) -> None:
        self.first: OutputDelta | None = None
        """The first delta."""
        self.first_token_s: float | None = None
        """Seconds to it."""
        self.finish_reasons: list[str] = []
        """Of the choices that have ended."""
        self._metrics = metrics
        self._model = model
        self._clock = clock
        self._params = params
        self._started = clock()
        self._last: dict[int, float] = {}
        self._replica: ReplicaMetrics | None = None

    def observe(self, delta: OutputDelta) -> None:
        """Count one delta of the prompt's choice ``delta.index``."""
        now = self._clock()
        metrics = self._replica or self._begin(delta, now)
        previous = self._last.get(delta.index)
        self._last[delta.index] = now
        if previous is not None:
            metrics.inter_token_latency.observe(now - previous)
        metrics.generation_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish(metrics, delta, now)

    def age_s(self) -> float:
        """Seconds since the prompt was given to the router."""
        return self._clock() - self._started

    def abandon(self, reason: str) -> None:
        """Count the choices that had begun and will not finish: ``abort`` or ``error``."""
        if self._replica is not None:
            for index in list(self._last):
                self._end(self._replica, index, reason, self._clock())
        elif not self.finish_reasons:
            self.finish_reasons.append(reason)

    def _begin(self, delta: OutputDelta, now: float) -> ReplicaMetrics:
        metrics = self._replica = self._metrics.of(self._model, delta.replica or "")
        self.first, self.first_token_s = delta, now - self._started
        metrics.time_to_first_token.observe(self.first_token_s)
        metrics.began(delta.num_prompt_tokens, delta.cached_tokens or 0, self._params)
        if delta.report is not None:
            metrics.queue_time.observe(delta.report.queue_s)
            metrics.prefill_time.observe(delta.report.prefill_s)
        return metrics

    def _finish(self, metrics: ReplicaMetrics, delta: OutputDelta, now: float) -> None:
        """A choice is whole."""
        decode_s = now - self._started - (self.first_token_s or 0.0)
        metrics.decode_time.observe(decode_s)
        metrics.request_output_tokens.observe(delta.num_output_tokens)
        if delta.num_output_tokens > 1:
            metrics.time_per_output_token.observe(decode_s / (delta.num_output_tokens - 1))
        if self.first is not None and self.first.report is not None:
            metrics.inference_time.observe(self.first.report.prefill_s + decode_s)
        self._end(metrics, delta.index, delta.finish_reason or "", now)

    def _end(self, metrics: ReplicaMetrics, index: int, reason: str, now: float) -> None:
        del self._last[index]
        self.finish_reasons.append(reason)
        metrics.e2e_latency.observe(now - self._started)
        metrics.ended(reason)


class _Families(CollectorRegistry):
    """What was read, and then what is counted, which any thread may read."""

    def __init__(self, known: Iterable[Metric], counted: Collector) -> None:
        super().__init__()
        self._parts = known, counted

    def collect(self) -> Iterable[Metric]:
        """See ``CollectorRegistry``."""
        known, counted = self._parts
        yield from known
        yield from counted.collect()


class _OfIngress(Collector):
    """What an ingress counts, under its name if it has one. The times at which counting began are left out."""

    def __init__(self, registry: CollectorRegistry, ingress: str) -> None:
        self._registry = registry
        self._labels = {"ingress": ingress} if ingress else {}

    def collect(self) -> Iterable[Metric]:
        """See ``Collector``."""
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._labels}) if self._labels else sample
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric
