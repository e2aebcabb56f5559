"""Where requests go and why, and what that saves."""

from .panels import Dashboard, Panel, Row
from .queries import SELECTED, counted, quantiles, ratio, share

ROUTING = Dashboard(
    "warmroot-routing",
    "Warmroot / Routing and cache",
    "Where requests go and why, and what that saves: predicted, actual and best possible hits.",
    (
        Row(
            "Hits",
            (
                Panel(
                    title="Share of prompt tokens that hit",
                    description="best far above predicted: load drives requests away from their prefix. predicted far "
                    "above actual: caches too small, or events late.",
                    unit="percentunit",
                    queries=(
                        ("best possible", share("warmroot:best_hit_tokens_total")),
                        ("predicted", share("warmroot:predicted_hit_tokens_total")),
                        ("actual", share("warmroot:actual_hit_tokens_total")),
                    ),
                    width=12,
                ),
                Panel(
                    title="Not sent to the warmest replica",
                    description="warmroot:routing_colder_choices_total of warmroot:routing_decisions_total",
                    unit="percentunit",
                    queries=(("", share("warmroot:routing_colder_choices_total", "warmroot:routing_decisions_total")),),
                    width=12,
                ),
                Panel(
                    title="Hit share of each replica",
                    description="vllm:prefix_cache_hits_total of vllm:prefix_cache_queries_total",
                    unit="percentunit",
                    queries=(
                        (
                            "{{engine}}",
                            ratio(
                                counted("vllm:prefix_cache_hits_total", "engine", SELECTED),
                                counted("vllm:prefix_cache_queries_total", "engine", SELECTED),
                            ),
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    title="Prompt tokens by where they came from",
                    description="vllm:prompt_tokens_by_source_total",
                    unit="short",
                    queries=(("{{source}}", counted("vllm:prompt_tokens_by_source_total", "source", SELECTED)),),
                    width=12,
                ),
            ),
        ),
        Row(
            "Decisions",
            (
                Panel(
                    title="Decisions",
                    description="warmroot:routing_decisions_total",
                    unit="reqps",
                    queries=(("{{policy}} {{reason}}", counted("warmroot:routing_decisions_total", "policy, reason")),),
                ),
                Panel(
                    title="Time of a decision",
                    description="warmroot:routing_decision_seconds",
                    unit="s",
                    queries=quantiles("warmroot:routing_decision_seconds", where=""),
                ),
                Panel(
                    title="Wait in the router",
                    description="warmroot:router_queue_seconds",
                    unit="s",
                    queries=quantiles("warmroot:router_queue_seconds", where=""),
                ),
                Panel(
                    title="Reservations",
                    description="Requests that replicas have been given. warmroot:reservations",
                    unit="short",
                    queries=(("requests", "sum(warmroot:reservations)"),),
                ),
                Panel(
                    title="Reserved tokens",
                    description="Prompt tokens on their way to a first token. warmroot:reserved_tokens",
                    unit="short",
                    queries=(("tokens", "sum(warmroot:reserved_tokens)"),),
                ),
                Panel(
                    title="Waiting in the router",
                    description="warmroot:queued_requests, warmroot:queued_tokens",
                    unit="short",
                    queries=(("requests", "sum(warmroot:queued_requests)"), ("tokens", "sum(warmroot:queued_tokens)")),
                ),
            ),
        ),
        Row(
            "Moves",
            (
                Panel(
                    title="Requests that went on elsewhere",
                    description="warmroot:migrations_total",
                    unit="reqps",
                    queries=(("{{reason}}", counted("warmroot:migrations_total", "reason")),),
                ),
                Panel(
                    title="Tokens computed once more",
                    description="warmroot:recomputed_tokens_total",
                    unit="short",
                    queries=(("tokens", counted("warmroot:recomputed_tokens_total")),),
                ),
                Panel(
                    title="Hot prefixes computed ahead",
                    description="warmroot:warm_ups_total",
                    unit="short",
                    queries=(("prefixes", counted("warmroot:warm_ups_total")),),
                ),
            ),
        ),
    ),
)
