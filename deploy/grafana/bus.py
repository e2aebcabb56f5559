"""What routers learn of caches, and how late; keys and limits."""

from .panels import Dashboard, Panel, Row
from .queries import counted, quantiles, seen

BUS = Dashboard(
    "warmroot-bus",
    "Warmroot / Event bus and access",
    "What routers learn of caches, and how late; keys and limits.",
    (
        Row(
            "Event bus",
            (
                Panel(
                    title="Metadata store",
                    description="1: every ingress can read it. warmroot:metadata_store_up",
                    unit="short",
                    queries=(("", "min(warmroot:metadata_store_up)"),),
                    kind="stat",
                ),
                Panel(
                    title="Event lag",
                    description="From a replica to the index; as good as the nodes' clocks agree. "
                    "warmroot:event_lag_seconds",
                    unit="s",
                    queries=quantiles("warmroot:event_lag_seconds", where=""),
                ),
                Panel(
                    title="Blocks in the index",
                    description="Of each ingress. warmroot:index_blocks",
                    unit="short",
                    queries=(("{{ingress}}", seen("warmroot:index_blocks", "ingress")),),
                ),
                Panel(
                    title="Mended",
                    description="warmroot:index_gaps_total, warmroot:index_resyncs_total",
                    unit="short",
                    queries=(
                        ("gaps", counted("warmroot:index_gaps_total")),
                        ("resyncs", counted("warmroot:index_resyncs_total")),
                    ),
                ),
                Panel(
                    title="Left out",
                    description="warmroot:index_skipped_batches_total, warmroot:index_conflicts_total",
                    unit="short",
                    queries=(
                        ("unreadable", counted("warmroot:index_skipped_batches_total")),
                        ("contradictions", counted("warmroot:index_conflicts_total")),
                    ),
                ),
                Panel(
                    title="Silent replicas",
                    description="They live and tell nothing. warmroot:index_silent_replicas",
                    unit="short",
                    queries=(("", "max(warmroot:index_silent_replicas)"),),
                ),
            ),
        ),
        Row(
            "Access",
            (
                Panel(
                    title="Refused by limits per minute",
                    description="warmroot:rate_limited_total",
                    unit="reqps",
                    queries=(("{{limit}}", counted("warmroot:rate_limited_total", "limit")),),
                ),
                Panel(
                    title="API keys",
                    description="warmroot:api_keys",
                    unit="short",
                    queries=(("keys", "max(warmroot:api_keys)"),),
                ),
                Panel(
                    title="Audit lines lost",
                    description="warmroot:audit_lines_lost_total",
                    unit="short",
                    queries=(("lines", counted("warmroot:audit_lines_lost_total")),),
                ),
            ),
        ),
    ),
)
