"""How many replicas there are, and what asks for more."""

from .panels import Dashboard, Panel, Row
from .queries import SELECTED, TTFT, counted, of_replica, quantile, rate_of_replica, seen


def _in(state: str) -> str:
    return f'{{model_name=~"$model",state="{state}"}}'


SCALING = Dashboard(
    "warmroot-autoscaling",
    "Warmroot / Autoscaling",
    "How many replicas there are and are wanted, and what asks for more.",
    (
        Row(
            "Replicas",
            (
                Panel(
                    title="Wanted and ready",
                    description="warmroot:autoscaling_target_replicas, warmroot:replicas",
                    unit="short",
                    queries=(
                        ("{{model_name}} wanted", seen("warmroot:autoscaling_target_replicas", "model_name", SELECTED)),
                        ("{{model_name}} ready", seen("warmroot:replicas", "model_name", _in("ready"))),
                        ("{{model_name}} draining", seen("warmroot:replicas", "model_name", _in("draining"))),
                    ),
                    width=12,
                ),
                Panel(
                    title="Needed",
                    description="By the signal that needs the most. warmroot:autoscaling_needed_replicas",
                    unit="short",
                    queries=(
                        ("{{signal}}", seen("warmroot:autoscaling_needed_replicas", "model_name, signal", SELECTED)),
                    ),
                    width=12,
                ),
                Panel(
                    title="Decisions",
                    description="That changed the number. warmroot:autoscaling_decisions_total",
                    unit="short",
                    queries=(
                        (
                            "{{direction}} {{signal}}",
                            "max by (model_name, direction, signal) "
                            f"(increase(warmroot:autoscaling_decisions_total{SELECTED}[$__rate_interval]))",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    title="Came and went",
                    description="warmroot:replicas_joined_total, warmroot:replicas_gone_total",
                    unit="short",
                    queries=(
                        ("came", "max(increase(warmroot:replicas_joined_total[$__rate_interval]))"),
                        ("went", "max(increase(warmroot:replicas_gone_total[$__rate_interval]))"),
                    ),
                    width=12,
                ),
            ),
        ),
        Row(
            "What asks for replicas",
            (
                Panel(
                    title="Tokens that wait",
                    description="warmroot:queued_tokens in routers, warmroot:replica_waiting_tokens in replicas",
                    unit="short",
                    queries=(
                        ("routers", "sum(warmroot:queued_tokens)"),
                        ("replicas", f"sum({of_replica('warmroot:replica_waiting_tokens')})"),
                    ),
                ),
                Panel(
                    title="KV in use, mean",
                    description="vllm:kv_cache_usage_perc",
                    unit="percentunit",
                    queries=(("", f"avg({of_replica('vllm:kv_cache_usage_perc')})"),),
                ),
                Panel(
                    title="Time to first token, p90",
                    description=TTFT,
                    unit="s",
                    queries=(("p90", quantile(0.9, TTFT)),),
                ),
                Panel(
                    title="Busy, mean",
                    description="warmroot:replica_busy_seconds_total",
                    unit="percentunit",
                    queries=(("", f"avg({rate_of_replica('warmroot:replica_busy_seconds_total')})"),),
                ),
                Panel(
                    title="Requests in routers and replicas",
                    description="warmroot:queued_requests, warmroot:reservations",
                    unit="short",
                    queries=(
                        ("waiting", "sum(warmroot:queued_requests)"),
                        ("in replicas", "sum(warmroot:reservations)"),
                    ),
                ),
                Panel(
                    title="Not served",
                    description="warmroot:refused_requests_total",
                    unit="reqps",
                    queries=(("{{reason}}", counted("warmroot:refused_requests_total", "reason")),),
                ),
            ),
        ),
    ),
)
