"""Metrics that are read from the cluster's state when Prometheus asks: replicas, routing, queue, event bus."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..cluster.histogram import HistogramCounts
from .admission import REFUSALS
from .openai.cluster_state import ClusterState, ReplicaState, ReplicaStatus, RoutingStats, StoreStatus
from .promises import OUTCOMES

LABELS = ("model_name", "engine")
KINDS = ("single", "gang")
MIGRATIONS = ("connection", "silence", "engine", "draining", "gap")
Figure = Callable[[ReplicaStatus], float]


class ReplicaCollector(Collector):
    """What replicas say of themselves: every ingress tells the same, so that a sum over ingresses is wrong."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """See ``Collector``."""
        replicas = self._cluster.replicas()
        for name, text, figure in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for replica in replicas:
                gauge.add_metric(_labels(replica), figure(replica))
            yield gauge
        for name, text, figure in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for replica in replicas:
                counter.add_metric(_labels(replica), figure(replica))
            yield counter
        yield _step_tokens(replicas)
        yield _accepted_by_place(replicas)
        yield _cache_config(replicas)
        yield _replica_info(replicas)
        yield from _ranks(replicas)


class RouterCollector(Collector):
    """What this ingress sees and has decided."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """See ``Collector``."""
        own = [router.model for router in self._cluster.routers() if router.is_own]
        yield _replicas(self._cluster.replicas(), filter(None, own))
        stats = self._cluster.routing()
        yield from _routing(stats)
        yield from _moves(stats)
        yield from _queue(stats)
        yield from _index(stats, self._cluster.store())


_GAUGES: tuple[tuple[str, str, Figure], ...] = (
    ("vllm:num_requests_running", "Sequences that are computed now", lambda one: one.load.running),
    ("vllm:num_requests_waiting", "Sequences that wait in the replica", lambda one: one.load.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks held by running sequences, 0 to 1",
        lambda one: one.load.kv_usage,
    ),
    (
        "warmroot:replica_waiting_tokens",
        "Prompt tokens that the replica has to compute",
        lambda one: one.load.waiting_tokens,
    ),
    (
        "warmroot:replica_cached_blocks",
        "KV blocks that the prefix cache keeps and nobody holds",
        lambda one: one.counts.cached_blocks,
    ),
    ("warmroot:gang_ranks", "Processes that the model is cut over", lambda one: len(one.info.ranks)),
)
_COUNTERS: tuple[tuple[str, str, Figure], ...] = (
    (
        "vllm:num_preemptions",
        "Running requests that gave their blocks back, to be computed once more",
        lambda one: one.counts.preemptions,
    ),
    ("vllm:spec_decode_num_drafts", "Drafts that were verified", lambda one: one.load.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted", lambda one: one.load.num_draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted",
        lambda one: sum(one.load.accepted_by_place),
    ),
    (
        "warmroot:replica_generation_tokens",
        "Tokens sampled and kept, for whomever",
        lambda one: one.counts.generation_tokens,
    ),
    ("warmroot:replica_busy_seconds", "Time in which steps were computed", lambda one: one.counts.busy_s),
    (
        "warmroot:replica_evicted_blocks",
        "Cached KV blocks that made room for others",
        lambda one: one.counts.evicted_blocks,
    ),
)


def _labels(replica: ReplicaStatus) -> tuple[str, str]:
    return replica.info.model, replica.info.replica


def _step_tokens(replicas: Sequence[ReplicaStatus]) -> Metric:
    histogram = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Tokens computed in a step, by how many steps had so many", labels=LABELS
    )
    for replica in replicas:
        steps = replica.counts.steps
        histogram.add_metric(_labels(replica), steps.buckets(), steps.total)
    return histogram


def _accepted_by_place(replicas: Sequence[ReplicaStatus]) -> Metric:
    by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were accepted, by place",
        labels=(*LABELS, "position"),
    )
    for replica in replicas:
        for place, count in enumerate(replica.load.accepted_by_place):
            by_place.add_metric((*_labels(replica), str(place)), count)
    return by_place


def _cache_config(replicas: Sequence[ReplicaStatus]) -> Metric:
    labels = (*LABELS, "block_size", "num_gpu_blocks", "cache_dtype")
    config = GaugeMetricFamily("vllm:cache_config_info", "The replica's KV cache", labels=labels)
    for replica in replicas:
        info = replica.info
        config.add_metric((*_labels(replica), str(info.block_size), str(info.kv_total_blocks), info.kv_format), 1)
    return config


def _replica_info(replicas: Sequence[ReplicaStatus]) -> Metric:
    labels = (*LABELS, "kv_format", "weights_format", "weights_version", "kernels", "node")
    facts = GaugeMetricFamily("warmroot:replica_info", "What the replica is", labels=labels)
    for replica in replicas:
        info = replica.info
        what = (info.kv_format, info.weights_format, info.weights_version, info.kernels, info.node)
        facts.add_metric((*_labels(replica), *what), 1)
    return facts


def _ranks(replicas: Sequence[ReplicaStatus]) -> Iterable[Metric]:
    labels = (*LABELS, "rank")
    memory = GaugeMetricFamily("warmroot:rank_memory_bytes", "Memory of a gang's process", labels=labels)
    steps = CounterMetricFamily("warmroot:rank_steps", "Steps that a gang's process has done", labels=labels)
    for replica in replicas:
        for rank in replica.info.ranks:
            memory.add_metric((*_labels(replica), str(rank.rank)), rank.memory_bytes)
            steps.add_metric((*_labels(replica), str(rank.rank)), rank.last_step)
    return memory, steps


def _replicas(replicas: Sequence[ReplicaStatus], models: Iterable[str]) -> Metric:
    """Of all ``models``: one without any replica has none in any state."""
    gauge = GaugeMetricFamily("warmroot:replicas", "Replicas by state", labels=("model_name", "state"))
    counts = Counter((replica.info.model, replica.state) for replica in replicas)
    for model in dict.fromkeys((*models, *(replica.info.model for replica in replicas))):
        for state in ReplicaState:
            gauge.add_metric((model, state.value), counts[model, state])
    return gauge


def _routing(stats: RoutingStats) -> Iterable[Metric]:
    decisions = CounterMetricFamily(
        "warmroot:routing_decisions", "Requests routed, by policy and reason", labels=("policy", "reason")
    )
    for (policy, reason), count in stats.decisions.items():
        decisions.add_metric((policy, reason), count)
    yield decisions
    yield _histogram("warmroot:routing_decision_seconds", "Time that a choice took", stats.decision_s)
    yield from _plain_counters(
        ("warmroot:predicted_hit_tokens", "Prompt tokens expected in the chosen cache", stats.predicted_hit_tokens),
        ("warmroot:actual_hit_tokens", "Prompt tokens found in the chosen cache", stats.actual_hit_tokens),
        ("warmroot:best_hit_tokens", "Prompt tokens expected in the warmest cache", stats.best_hit_tokens),
        ("warmroot:routing_colder_choices", "Requests not sent to the warmest replica", stats.colder_choices),
        ("warmroot:warm_ups", "Hot prefixes that replicas were asked to compute", stats.warm_ups),
    )
    yield GaugeMetricFamily(
        "warmroot:reservations", "Requests that replicas were given and have not ended", value=stats.reservations
    )
    yield GaugeMetricFamily(
        "warmroot:reserved_tokens", "Prompt tokens under way to a first token", value=stats.reserved_tokens
    )


def _moves(stats: RoutingStats) -> Iterable[Metric]:
    yield _by(
        "warmroot:migrations",
        "Requests that went on elsewhere, by why their replica lost them",
        "reason",
        stats.migrations,
        MIGRATIONS,
    )
    yield from _plain_counters(
        ("warmroot:recomputed_tokens", "Tokens computed once more as requests moved", stats.recomputed_tokens)
    )
    yield _by("warmroot:replicas_joined", "Replicas that came", "kind", stats.joined, KINDS)
    yield _by("warmroot:replicas_gone", "Replicas that ended or were lost", "kind", stats.gone, KINDS)


def _queue(stats: RoutingStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("warmroot:queued_requests", "Requests that wait in the router", value=stats.waiting)
    yield GaugeMetricFamily(
        "warmroot:queued_tokens", "Prompt tokens to compute that wait in the router", value=stats.waiting_tokens
    )
    yield _histogram("warmroot:router_queue_seconds", "Time that a request waited in the router", stats.wait_s)
    yield _by(
        "warmroot:refused_requests",
        "Requests not served for want of room or time",
        "reason",
        stats.refused,
        REFUSALS,
    )
    yield _by(
        "warmroot:retry_promises",
        "Places promised by Retry-After, by what became of them",
        "outcome",
        stats.promises,
        OUTCOMES,
    )


def _index(stats: RoutingStats, status: StoreStatus) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "warmroot:metadata_store_up", "Whether the metadata store can be read", value=not status.fault
    )
    yield GaugeMetricFamily(
        "warmroot:index_blocks", "Distinct KV blocks that the prefix index knows", value=status.index_blocks
    )
    yield _histogram("warmroot:event_lag_seconds", "Time of event batches on their way to the index", stats.event_lag_s)
    yield from _plain_counters(
        ("warmroot:index_gaps", "Event batches that did not follow what was known", status.gaps),
        ("warmroot:index_skipped_batches", "Event batches that could not be read", status.skipped),
        ("warmroot:index_conflicts", "Event batches that contradicted what was known", status.conflicts),
        ("warmroot:index_resyncs", "Replicas asked anew as the index was wrong of them", status.resyncs),
    )
    yield GaugeMetricFamily(
        "warmroot:index_silent_replicas", "Replicas that live but do not tell what they hold", value=status.silent
    )


def _histogram(name: str, text: str, counts: HistogramCounts) -> Metric:
    return HistogramMetricFamily(name, text, buckets=counts.buckets(), sum_value=counts.total)


def _plain_counters(*counters: tuple[str, str, float]) -> Iterable[Metric]:
    return [CounterMetricFamily(name, text, value=value) for name, text, value in counters]


def _by(name: str, text: str, label: str, counts: Mapping[str, int], known: Iterable[str]) -> Metric:
    """A counter with a sample for each known value of its label, and for whatever else was counted."""
    counter = CounterMetricFamily(name, text, labels=(label,))
    for value in dict.fromkeys((*known, *counts)):
        counter.add_metric((value,), counts.get(value, 0))
    return counter
