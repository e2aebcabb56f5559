"""What clients get: latency against the SLO, traffic, errors, and where the time goes."""

from .panels import Dashboard, Panel, Row
from .queries import ITL, ITL_SLO, SELECTED, TTFT, TTFT_SLO, counted, quantile, quantiles, ratio, share, within

SERVICE = Dashboard(
    "warmroot-service",
    "Warmroot / Service",
    "What clients get: latency against the SLO, traffic, errors, and where the time goes.",
    (
        Row(
            "At a glance",
            (
                Panel(
                    title="First token within 2.5 s",
                    description=f"Share of requests. {TTFT}",
                    unit="percentunit",
                    queries=(("", within(TTFT, TTFT_SLO)),),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    title="Next token within 0.1 s",
                    description=f"Share of gaps between deltas. {ITL}",
                    unit="percentunit",
                    queries=(("", within(ITL, ITL_SLO)),),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    title="Server errors",
                    description="Share of responses with 5xx. warmroot:http_responses_total",
                    unit="percentunit",
                    queries=(
                        (
                            "",
                            ratio(
                                counted("warmroot:http_responses_total", where='{status=~"5.."}'),
                                counted("warmroot:http_responses_total"),
                            ),
                        ),
                    ),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    title="Prompt tokens from the cache",
                    description="vllm:prefix_cache_hits_total of vllm:prefix_cache_queries_total",
                    unit="percentunit",
                    queries=(("", share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")),),
                    kind="stat",
                    width=6,
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    title="Time to first token",
                    description=TTFT,
                    unit="s",
                    queries=quantiles(TTFT),
                ),
                Panel(title="Between tokens", description=ITL, unit="s", queries=quantiles(ITL)),
                Panel(
                    title="Whole requests",
                    description="vllm:e2e_request_latency_seconds",
                    unit="s",
                    queries=quantiles("vllm:e2e_request_latency_seconds"),
                ),
                Panel(
                    title="Where the time goes, p95",
                    description="In the router, in the replica's queue, prefill, decode.",
                    unit="s",
                    queries=(
                        ("router", quantile(0.95, "warmroot:router_queue_seconds", where="")),
                        ("queue", quantile(0.95, "vllm:request_queue_time_seconds")),
                        ("prefill", quantile(0.95, "vllm:request_prefill_time_seconds")),
                        ("decode", quantile(0.95, "vllm:request_decode_time_seconds")),
                    ),
                    width=12,
                ),
                Panel(
                    title="Token by token, mean of a sequence, p95",
                    description="vllm:request_time_per_output_token_seconds",
                    unit="s",
                    queries=(("p95", quantile(0.95, "vllm:request_time_per_output_token_seconds")),),
                    width=12,
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    title="Sequences ended",
                    description="By reason. vllm:request_success_total",
                    unit="reqps",
                    queries=(
                        (
                            "{{finished_reason}}",
                            counted("vllm:request_success_total", "finished_reason", SELECTED),
                        ),
                    ),
                ),
                Panel(
                    title="Tokens",
                    description="vllm:prompt_tokens_total, vllm:generation_tokens_total",
                    unit="short",
                    queries=(
                        ("prompt", counted("vllm:prompt_tokens_total", where=SELECTED)),
                        ("output", counted("vllm:generation_tokens_total", where=SELECTED)),
                    ),
                ),
                Panel(
                    title="Responses",
                    description="By route and status. warmroot:http_responses_total",
                    unit="reqps",
                    queries=(("{{route}} {{status}}", counted("warmroot:http_responses_total", "route, status")),),
                ),
                Panel(
                    title="Not served for want of room or time",
                    description="warmroot:refused_requests_total",
                    unit="reqps",
                    queries=(("{{reason}}", counted("warmroot:refused_requests_total", "reason")),),
                ),
                Panel(
                    title="Prompt length",
                    description="vllm:request_prompt_tokens",
                    unit="short",
                    queries=quantiles("vllm:request_prompt_tokens"),
                ),
                Panel(
                    title="Output length",
                    description="vllm:request_generation_tokens",
                    unit="short",
                    queries=quantiles("vllm:request_generation_tokens"),
                ),
            ),
        ),
    ),
)
