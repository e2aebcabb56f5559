"""Prometheus metrics of an ingress: ``vllm:*`` names for requests and replicas, ``warmroot:*`` for routing.

Counters and histograms are fed request by request; what the cluster knows is read at scrape time. The label
``engine`` is the replica's id. vLLM's dashboards and the Gateway API's endpoint picker read these names.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .admission import REFUSALS
from .openai.cluster_state import ClusterState, ReplicaState, ReplicaStatus, RoutingStats
from .output import OutputDelta
from .promises import OUTCOMES

LABELS = ("model_name", "engine")
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class RequestMetrics:
    """The collectors of one application, in a registry of its own."""

    def __init__(self, cluster: ClusterState) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Time to first token", TTFT_BUCKETS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Time between deltas", ITL_BUCKETS)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Time to the last token", E2E_BUCKETS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was in the cache")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.ended = Counter(
            "vllm:request_success",
            "Sequences that ended after their first token, by reason",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.registry.register(ClusterCollector(cluster))
        self._of: dict[tuple[str, str], ReplicaMetrics] = {}

    def of(self, model: str, engine: str) -> "ReplicaMetrics":
        """Those of one replica. Looking a metric up by its labels costs more than counting."""
        found = self._of.get((model, engine))
        if found is None:
            found = self._of[model, engine] = ReplicaMetrics(self, model, engine)
        return found

    def exposition(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry)


class ReplicaMetrics:
    """The metrics of one replica's requests."""

    def __init__(self, metrics: RequestMetrics, *labels: str) -> None:
        self.time_to_first_token = metrics.time_to_first_token.labels(*labels)
        self.inter_token_latency = metrics.inter_token_latency.labels(*labels)
        self.e2e_latency = metrics.e2e_latency.labels(*labels)
        self.looked_up = [metric.labels(*labels) for metric in (metrics.prompt_tokens, metrics.cache_queries)]
        self.cached = [metric.labels(*labels) for metric in (metrics.cached_tokens, metrics.cache_hits)]
        self.generation_tokens = metrics.generation_tokens.labels(*labels)
        self._ended = metrics.ended
        self._labels = labels
        self._by_reason: dict[str, Counter] = {}

    def ended(self, reason: str) -> None:
        """Count a sequence that ended."""
        counter = self._by_reason.get(reason)
        if counter is None:
            counter = self._by_reason[reason] = self._ended.labels(*self._labels, reason)
        counter.inc()


class RequestMeter:
    """Watches the deltas of one prompt. ``clock`` is monotonic, in seconds."""

    def __init__(self, metrics: RequestMetrics, model: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._model = model
        self._clock = clock
        self._started = clock()
        self._last: dict[int, float] = {}
        self._replica: ReplicaMetrics | None = None

    def observe(self, delta: OutputDelta) -> None:
        """Count one delta of the prompt's choice ``delta.index``."""
        now = self._clock()
        metrics = self._replica or self._first(delta, now)
        previous = self._last.get(delta.index)
        self._last[delta.index] = now
        if previous is not None:
            metrics.inter_token_latency.observe(now - previous)
        metrics.generation_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish(metrics, delta.index, delta.finish_reason)

    def abandon(self, reason: str) -> None:
        """Count the choices that had begun and will not finish: ``abort`` or ``error``."""
        if self._replica is not None:
            for index in list(self._last):
                self._finish(self._replica, index, reason)

    def _first(self, delta: OutputDelta, now: float) -> ReplicaMetrics:
        metrics = self._replica = self._metrics.of(self._model, delta.replica or "")
        metrics.time_to_first_token.observe(now - self._started)
        for counter in metrics.looked_up:
            counter.inc(delta.num_prompt_tokens)
        for counter in metrics.cached:
            counter.inc(delta.cached_tokens or 0)
        return metrics

    def _finish(self, metrics: ReplicaMetrics, index: int, reason: str) -> None:
        del self._last[index]
        metrics.e2e_latency.observe(self._clock() - self._started)
        metrics.ended(reason)


class ClusterCollector(Collector):
    """Reads the cluster's state when Prometheus asks."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """The gauges of each replica and the counts of the router."""
        replicas = self._cluster.replicas()
        yield from _replica_gauges(replicas)
        yield _cache_config(replicas)
        yield _ready_replicas(replicas)
        yield from _speculation(replicas)
        stats = self._cluster.routing()
        yield from _routing(stats)
        yield from _queue(stats)
        yield from self._store()

    def _store(self) -> Iterable[Metric]:
        status = self._cluster.store()
        yield GaugeMetricFamily(
            "warmroot:metadata_store_up", "Whether the metadata store can be read", value=not status.fault
        )
        yield GaugeMetricFamily(
            "warmroot:index_blocks", "Distinct KV blocks that the prefix index knows", value=status.index_blocks
        )
        yield CounterMetricFamily(
            "warmroot:index_gaps", "Event batches that did not follow what was known", value=status.gaps
        )
        yield CounterMetricFamily(
            "warmroot:index_skipped_batches", "Event batches that could not be read", value=status.skipped
        )
        yield CounterMetricFamily(
            "warmroot:index_conflicts", "Event batches that contradicted what was known", value=status.conflicts
        )
        yield CounterMetricFamily(
            "warmroot:index_resyncs", "Replicas asked anew as the index was wrong of them", value=status.resyncs
        )
        yield GaugeMetricFamily(
            "warmroot:index_silent_replicas", "Replicas that live but do not tell what they hold", value=status.silent
        )


def _routing(stats: RoutingStats) -> Iterable[Metric]:
    decisions = CounterMetricFamily(
        "warmroot:routing_decisions", "Requests routed, by policy and reason", labels=("policy", "reason")
    )
    for (policy, reason), count in stats.decisions.items():
        decisions.add_metric((policy, reason), count)
    yield decisions
    for name, text, tokens in (
        ("predicted", "Prompt tokens expected in the chosen replica's cache", stats.predicted_hit_tokens),
        ("actual", "Prompt tokens that the chosen replica found in its cache", stats.actual_hit_tokens),
        ("best", "Prompt tokens that the warmest replica would have had", stats.best_hit_tokens),
    ):
        yield CounterMetricFamily(f"warmroot:{name}_hit_tokens", text, value=tokens)
    yield CounterMetricFamily(
        "warmroot:warm_ups", "Hot prefixes that replicas were asked to compute", value=stats.warm_ups
    )
    migrations = CounterMetricFamily(
        "warmroot:migrations", "Requests that went on elsewhere, by why their replica lost them", labels=("reason",)
    )
    for reason, count in stats.migrations.items():
        migrations.add_metric((reason,), count)
    yield migrations
    yield CounterMetricFamily(
        "warmroot:recomputed_tokens", "Tokens computed once more as requests moved", value=stats.recomputed_tokens
    )


def _queue(stats: RoutingStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("warmroot:queued_requests", "Requests that wait in the router", value=stats.waiting)
    yield GaugeMetricFamily(
        "warmroot:queued_tokens", "Prompt tokens to compute that wait in the router", value=stats.waiting_tokens
    )
    refused = CounterMetricFamily(
        "warmroot:refused_requests", "Requests not served for want of room or time", labels=("reason",)
    )
    for reason in REFUSALS:
        refused.add_metric((reason,), stats.refused.get(reason, 0))
    yield refused
    promises = CounterMetricFamily(
        "warmroot:retry_promises", "Places promised by Retry-After, by what became of them", labels=("outcome",)
    )
    for outcome in OUTCOMES:
        promises.add_metric((outcome,), stats.promises.get(outcome, 0))
    yield promises


def _replica_gauges(replicas: Iterable[ReplicaStatus]) -> list[GaugeMetricFamily]:
    running = _gauge("num_requests_running", "Sequences that are computed now")
    waiting = _gauge("num_requests_waiting", "Sequences that wait in the replica")
    usage = _gauge("kv_cache_usage_perc", "Share of KV blocks held by running sequences, 0 to 1")
    for replica in replicas:
        labels = (replica.info.model, replica.info.replica)
        running.add_metric(labels, replica.load.running)
        waiting.add_metric(labels, replica.load.waiting)
        usage.add_metric(labels, replica.load.kv_usage)
    return [running, waiting, usage]


def _speculation(replicas: Iterable[ReplicaStatus]) -> list[CounterMetricFamily]:
    drafts = _count("num_drafts", "Drafts that were verified")
    drafted = _count("num_draft_tokens", "Tokens that were drafted")
    accepted = _count("num_accepted_tokens", "Drafted tokens that were accepted")
    by_place = _count("num_accepted_tokens_per_pos", "Drafted tokens that were accepted, by place", "position")
    for replica in replicas:
        load, labels = replica.load, (replica.info.model, replica.info.replica)
        drafts.add_metric(labels, load.num_drafts)
        drafted.add_metric(labels, load.num_draft_tokens)
        accepted.add_metric(labels, sum(load.accepted_by_place))
        for place, count in enumerate(load.accepted_by_place):
            by_place.add_metric((*labels, str(place)), count)
    return [drafts, drafted, accepted, by_place]


def _count(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=(*LABELS, *labels))


def _cache_config(replicas: Iterable[ReplicaStatus]) -> GaugeMetricFamily:
    labels = (*LABELS, "block_size", "num_gpu_blocks")
    config = GaugeMetricFamily("vllm:cache_config_info", "The replica's KV cache", labels=labels)
    for replica in replicas:
        info = replica.info
        config.add_metric((info.model, info.replica, str(info.block_size), str(info.kv_total_blocks)), 1)
    return config


def _ready_replicas(replicas: Iterable[ReplicaStatus]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily("warmroot:replicas", "Replicas by state", labels=("state",))
    states = [replica.state for replica in replicas]
    for state in ReplicaState:
        gauge.add_metric((state.value,), states.count(state))
    return gauge


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
