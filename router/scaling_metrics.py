"""Metrics of autoscaling: what was decided last, and how often replicas were added and removed, and why."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cluster.scaling import SIGNALS
from .openai.cluster_state import ClusterState

_LABELS = ("model_name",)


class ScalingCollector(Collector):
    """Of the models whose number of replicas follows the work. Every ingress tells the same."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """See ``Collector``."""
        target = GaugeMetricFamily("warmroot:autoscaling_target_replicas", "Replicas there are to be", labels=_LABELS)
        ready = GaugeMetricFamily("warmroot:autoscaling_ready_replicas", "Of these, those that serve", labels=_LABELS)
        needed = GaugeMetricFamily(
            "warmroot:autoscaling_needed_replicas",
            "Replicas that are needed now, by the signal that needs the most",
            labels=(*_LABELS, "signal"),
        )
        changes = CounterMetricFamily(
            "warmroot:autoscaling_decisions",
            "Decisions that changed the number, by direction and signal",
            labels=(*_LABELS, "direction", "signal"),
        )
        for status in self._cluster.autoscalers():
            latest = status.latest
            target.add_metric((status.model,), latest.target)
            ready.add_metric((status.model,), latest.ready)
            for signal in SIGNALS:
                needed.add_metric((status.model, signal), latest.needed if signal == latest.signal else 0.0)
            for (direction, signal), count in status.changes.items():
                changes.add_metric((status.model, direction, signal), count)
        yield from (target, ready, needed, changes)
