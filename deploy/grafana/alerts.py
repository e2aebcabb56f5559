"""The alerts. Each has a unit test in ``deploy/checks/rules_test.yaml``."""

from dataclasses import dataclass
from typing import Any

from .queries import ITL, ITL_SLO, TTFT, TTFT_SLO

TTFT_MISSES, ITL_MISSES = 0.05, 0.05
"""Shares of first tokens, and of gaps between tokens, that may take longer than the SLO."""
FAST, SLOW = 14.4, 6.0
"""How many times as fast as allowed misses come when somebody is woken, and when somebody is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """``wait`` is for how long ``expr`` must hold."""

    name: str
    expr: str
    wait: str
    severity: str = "warning"
    summary: str
    description: str

    def body(self) -> dict[str, Any]:
        """A rule of Prometheus."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


_RUNNING = "max by (model_name, engine) (vllm:num_requests_running)"


def misses(histogram: str, bound: str, window: str) -> str:
    """Share of a model's values above a bucket's ``bound`` within ``window``."""
    good = f'sum by (model_name) (rate({histogram}_bucket{{le="{bound}"}}[{window}]))'
    return f"1 - {good} / (sum by (model_name) (rate({histogram}_count[{window}])) > 0)"


def _burns(histogram: str, bound: str, allowed: float, times: float, windows: tuple[str, str]) -> str:
    """In a long window, so that it matters, and in a short one, so that it ends when the trouble does."""
    return " and ".join(f"({misses(histogram, bound, window)}) > {times * allowed:g}" for window in windows)


ALERTS = (
    Alert(
        name="WarmrootNoReplicaReady",
        expr='max by (model_name) (warmroot:replicas{state="ready"}) == 0'
        " unless max by (model_name) (warmroot:autoscaling_target_replicas) == 0",
        wait="2m",
        severity="critical",
        summary="No replica of {{ $labels.model_name }} is ready.",
        description="Its requests get 503 until one is. Look at the RayService and at the replicas' logs.",
    ),
    Alert(
        name="WarmrootNotScraped",
        expr="absent(warmroot:replicas)",
        wait="10m",
        summary="Nothing is known of Warmroot.",
        description="Its ingress is not scraped, or does not answer. The other alerts are blind.",
    ),
    Alert(
        name="WarmrootReplicaUnhealthy",
        expr='max by (model_name) (warmroot:replicas{state="unhealthy"}) > 0',
        wait="5m",
        summary="{{ $value }} replica(s) of {{ $labels.model_name }} cannot be reached.",
        description="Serve replaces a replica that has failed; one that stays so is cut off, or finds no place.",
    ),
    Alert(
        name="WarmrootReplicasRestart",
        expr="max(increase(warmroot:replicas_gone_total[30m])) > 5"
        " unless changes(max(warmroot:autoscaling_target_replicas)[30m:1m]) > 0",
        wait="0m",
        summary="Replicas end again and again.",
        description="More than five have gone in half an hour. Look at what they last said.",
    ),
    Alert(
        name="WarmrootFirstTokensBurn",
        expr=_burns(TTFT, TTFT_SLO, TTFT_MISSES, FAST, ("1h", "5m")),
        wait="2m",
        severity="critical",
        summary="First tokens of {{ $labels.model_name }} are late.",
        description=f"So many take over {TTFT_SLO} s that a month's allowance is gone in two days. Add replicas.",
    ),
    Alert(
        name="WarmrootFirstTokensLate",
        expr=_burns(TTFT, TTFT_SLO, TTFT_MISSES, SLOW, ("6h", "30m")),
        wait="15m",
        summary="First tokens of {{ $labels.model_name }} are late, for hours.",
        description=f"More than {SLOW * TTFT_MISSES:.0%} take more than {TTFT_SLO} s. Look at queues and hit rates.",
    ),
    Alert(
        name="WarmrootTokensLate",
        expr=_burns(ITL, ITL_SLO, ITL_MISSES, SLOW, ("6h", "30m")),
        wait="15m",
        summary="Tokens of {{ $labels.model_name }} come slowly, for hours.",
        description=f"More than {SLOW * ITL_MISSES:.0%} of the gaps take over {ITL_SLO} s: batches are too large.",
    ),
    Alert(
        name="WarmrootServerErrors",
        expr='sum(rate(warmroot:http_responses_total{status=~"5.."}[5m]))'
        " / (sum(rate(warmroot:http_responses_total[5m])) > 0) > 0.05",
        wait="5m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the responses are server errors.",
        description="Look at the ingress's log, and at which routes have them.",
    ),
    Alert(
        name="WarmrootRequestsRefused",
        expr="sum(rate(warmroot:refused_requests_total[5m])) / sum(rate(warmroot:http_responses_total[5m])) > 0.05",
        wait="10m",
        summary="{{ $value | humanizePercentage }} of the requests are refused.",
        description="There is no room for them, or not in time. Add replicas, or let more wait.",
    ),
    Alert(
        name="WarmrootQueueBacklog",
        expr="sum by (model_name) (max by (model_name, engine) (vllm:num_requests_waiting))"
        " > 2 * sum by (model_name) (max by (model_name, engine) (vllm:num_requests_running))",
        wait="10m",
        summary="Requests to {{ $labels.model_name }} wait.",
        description="More than twice as many wait as are computed. Add replicas.",
    ),
    Alert(
        name="WarmrootRouterBacklog",
        expr="sum(warmroot:queued_requests) > 2 * sum(max by (model_name, engine) (vllm:num_requests_running))",
        wait="10m",
        summary="{{ $value }} requests wait in the routers.",
        description="Twice as many as are computed, and no replica has room for them. Add replicas.",
    ),
    Alert(
        name="WarmrootKvMemoryFull",
        expr="max by (model_name, engine) (vllm:kv_cache_usage_perc) > 0.95",
        wait="10m",
        summary="The KV memory of {{ $labels.engine }} is full.",
        description="Running sequences hold it, so that others are preempted. "
        "Add replicas, or a smaller kv_cache_dtype.",
    ),
    Alert(
        name="WarmrootLoadUneven",
        expr=f"max by (model_name) ({_RUNNING}) > 4 * (sum by (model_name) ({_RUNNING})"
        f" - max by (model_name) ({_RUNNING})) / (count by (model_name) ({_RUNNING}) - 1 > 0) + 8",
        wait="15m",
        summary="One replica of {{ $labels.model_name }} has most of the work.",
        description="A prefix may be too hot for one, or the others cannot be reached.",
    ),
    Alert(
        name="WarmrootHitRateDropped",
        expr="sum(rate(warmroot:actual_hit_tokens_total[30m])) / sum(rate(vllm:prompt_tokens_total[30m]))"
        " < 0.5 * (sum(rate(warmroot:actual_hit_tokens_total[30m] offset 1d))"
        " / sum(rate(vllm:prompt_tokens_total[30m] offset 1d)) > 0.1)",
        wait="30m",
        summary="Half as many prompt tokens are cached as yesterday.",
        description="After a restart or new weights it comes back. Otherwise caches are too small, or prompts changed.",
    ),
    Alert(
        name="WarmrootMetadataStoreDown",
        expr="min(warmroot:metadata_store_up) == 0",
        wait="2m",
        summary="The metadata store cannot be read.",
        description="Routing goes on with what is known. Look at the Redis named metadata.",
    ),
    Alert(
        name="WarmrootEventsLate",
        expr="histogram_quantile(0.9, sum by (le) (rate(warmroot:event_lag_seconds_bucket[10m]))) > 2.5",
        wait="10m",
        summary="Events of caches take seconds to the routers.",
        description="Requests go where their prefix was. Look at the bus and at the nodes' clocks.",
    ),
    Alert(
        name="WarmrootReplicasSilent",
        expr="max(warmroot:index_silent_replicas) > 0",
        wait="10m",
        summary="{{ $value }} replica(s) tell nothing of their caches.",
        description="They seem cold to every router. Restart them.",
    ),
)


def rules() -> dict[str, Any]:
    """A file of rules."""
    return {"groups": [{"name": "warmroot", "rules": [alert.body() for alert in ALERTS]}]}
