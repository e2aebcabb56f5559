"""What Prometheus learns of keys, limits and the audit log. No label names a key or a tenant."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..json_lines import JsonLines
from .key_store import KeyStore
from .rate_limits import RateLimiter


class TenancyCollector(Collector):
    """Reads the counts when Prometheus asks."""

    def __init__(self, keys: KeyStore, limiter: RateLimiter, audit: JsonLines | None) -> None:
        self._keys = keys
        self._limiter = limiter
        self._audit = audit

    def collect(self) -> Iterable[Metric]:
        """See ``Collector``."""
        yield GaugeMetricFamily("warmroot:api_keys", "API keys that are known", value=len(self._keys.ring))
        yield GaugeMetricFamily(
            "warmroot:api_keys_stale",
            "Whether the file of API keys cannot be read, and older ones are in use",
            value=bool(self._keys.fault),
        )
        yield CounterMetricFamily(
            "warmroot:api_keys_faults", "Times that the file of API keys could not be read", value=self._keys.num_faults
        )
        refused = CounterMetricFamily(
            "warmroot:rate_limited", "Requests refused by a limit per minute", labels=("limit",)
        )
        for kind, count in self._limiter.refused.items():
            refused.add_metric((kind,), count)
        yield refused
        lost = self._audit.lost if self._audit is not None else 0
        yield CounterMetricFamily("warmroot:audit_lines_lost", "Lines that the audit log could not write", value=lost)
