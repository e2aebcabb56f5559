"""What a running cluster tells: every metric that dashboards and alerts read is exported, with values after traffic."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from warmroot.deploy.checks.prometheus import METRIC
from warmroot.deploy.grafana.alerts import ALERTS
from warmroot.deploy.grafana.files import generated

from .cluster_harness import Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]
AFTER_TRAFFIC = (
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:request_success_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:iteration_tokens_total_sum",
    "warmroot:replica_generation_tokens_total",
    "warmroot:replica_busy_seconds_total",
    "warmroot:routing_decision_seconds_count",
    "warmroot:router_queue_seconds_count",
    "warmroot:event_lag_seconds_count",
    "warmroot:replicas_joined_total",
    "warmroot:index_blocks",
    "warmroot:http_responses_total",
)


def scrape(client: httpx.Client) -> tuple[set[str], dict[str, float]]:
    """Names of all samples that there can be, and the sum of each one's values."""
    names: set[str] = set()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return names, sums


def test_what_dashboards_and_alerts_read_is_exported_and_moves(cluster: Cluster, client: httpx.Client):
    body = {"model": "smollm2", "prompt": "One two three four five six seven " * 8, "max_tokens": 4, "temperature": 0}
    for _ in range(3):
        client.post("/v1/completions", json=body).raise_for_status()
    names, _ = scrape(client)
    read = {name for content in generated().values() for name in METRIC.findall(content)}
    read |= {name for alert in ALERTS for name in METRIC.findall(alert.expr)}
    assert len(read) > 50
    assert read <= names | {name.removesuffix(suffix) for name in names for suffix in ("_bucket", "_total")}
    still: list[str] = []

    def all_move() -> bool:
        _, sums = scrape(client)
        still[:] = [name for name in AFTER_TRAFFIC if not sums.get(name)]
        return not still

    wait_until(all_move, 15, lambda: still)
