"""Each replica's load, KV memory and speculation, and its gang."""

from .panels import Dashboard, Panel, Row
from .queries import SELECTED, of_replica, rate_of_replica, ratio, seen

REPLICAS = Dashboard(
    "warmroot-replicas",
    "Warmroot / Replicas and gangs",
    "Each replica's queue, KV memory, steps and speculation, and the processes of its gang.",
    (
        Row(
            "Load",
            (
                Panel(
                    title="Running",
                    description="vllm:num_requests_running",
                    unit="short",
                    queries=(("{{engine}}", of_replica("vllm:num_requests_running")),),
                ),
                Panel(
                    title="Waiting",
                    description="vllm:num_requests_waiting",
                    unit="short",
                    queries=(("{{engine}}", of_replica("vllm:num_requests_waiting")),),
                ),
                Panel(
                    title="Prompt tokens to compute",
                    description="warmroot:replica_waiting_tokens",
                    unit="short",
                    queries=(("{{engine}}", of_replica("warmroot:replica_waiting_tokens")),),
                ),
                Panel(
                    title="Busy",
                    description="Share of time in which steps are computed. warmroot:replica_busy_seconds_total",
                    unit="percentunit",
                    queries=(("{{engine}}", rate_of_replica("warmroot:replica_busy_seconds_total")),),
                ),
                Panel(
                    title="Tokens generated",
                    description="warmroot:replica_generation_tokens_total",
                    unit="short",
                    queries=(("{{engine}}", rate_of_replica("warmroot:replica_generation_tokens_total")),),
                ),
                Panel(
                    title="Tokens in a step, mean",
                    description="vllm:iteration_tokens_total",
                    unit="short",
                    queries=(
                        (
                            "{{engine}}",
                            ratio(
                                rate_of_replica("vllm:iteration_tokens_total_sum"),
                                rate_of_replica("vllm:iteration_tokens_total_count"),
                            ),
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "KV memory",
            (
                Panel(
                    title="KV in use",
                    description="vllm:kv_cache_usage_perc",
                    unit="percentunit",
                    queries=(("{{engine}}", of_replica("vllm:kv_cache_usage_perc")),),
                ),
                Panel(
                    title="Blocks kept for later",
                    description="warmroot:replica_cached_blocks",
                    unit="short",
                    queries=(("{{engine}}", of_replica("warmroot:replica_cached_blocks")),),
                ),
                Panel(
                    title="Evicted and preempted",
                    description="warmroot:replica_evicted_blocks_total, vllm:num_preemptions_total",
                    unit="short",
                    queries=(
                        ("{{engine}} blocks evicted", rate_of_replica("warmroot:replica_evicted_blocks_total")),
                        ("{{engine}} preempted", rate_of_replica("vllm:num_preemptions_total")),
                    ),
                ),
            ),
        ),
        Row(
            "Speculation",
            (
                Panel(
                    title="Drafted tokens that are accepted",
                    description="vllm:spec_decode_num_accepted_tokens_total of vllm:spec_decode_num_draft_tokens_total",
                    unit="percentunit",
                    queries=(
                        (
                            "{{engine}}",
                            ratio(
                                rate_of_replica("vllm:spec_decode_num_accepted_tokens_total"),
                                rate_of_replica("vllm:spec_decode_num_draft_tokens_total"),
                            ),
                        ),
                    ),
                ),
                Panel(
                    title="Accepted tokens of a draft, mean",
                    description="vllm:spec_decode_num_accepted_tokens_total of vllm:spec_decode_num_drafts_total",
                    unit="short",
                    queries=(
                        (
                            "{{engine}}",
                            ratio(
                                rate_of_replica("vllm:spec_decode_num_accepted_tokens_total"),
                                rate_of_replica("vllm:spec_decode_num_drafts_total"),
                            ),
                        ),
                    ),
                ),
                Panel(
                    title="Accepted by place",
                    description="vllm:spec_decode_num_accepted_tokens_per_pos_total",
                    unit="short",
                    queries=(
                        (
                            "{{position}}",
                            "sum by (position) (max by (engine, position) "
                            f"(rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{SELECTED}[$__rate_interval])))",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Replicas and gangs",
            (
                Panel(
                    title="Replicas by state",
                    description="As the ingress that sees most of them sees them. warmroot:replicas",
                    unit="short",
                    queries=(
                        ("{{state}}", f"sum by (state) ({seen('warmroot:replicas', 'model_name, state', SELECTED)})"),
                    ),
                ),
                Panel(
                    title="Ranks",
                    description="Processes of each gang. warmroot:gang_ranks",
                    unit="short",
                    queries=(("{{engine}}", of_replica("warmroot:gang_ranks")),),
                ),
                Panel(
                    title="Came and went",
                    description="A gang that is rebuilt goes and comes. "
                    "warmroot:replicas_joined_total, warmroot:replicas_gone_total",
                    unit="short",
                    queries=(
                        ("{{kind}} came", "max by (kind) (increase(warmroot:replicas_joined_total[$__rate_interval]))"),
                        ("{{kind}} went", "max by (kind) (increase(warmroot:replicas_gone_total[$__rate_interval]))"),
                    ),
                ),
                Panel(
                    title="Memory of ranks",
                    description="warmroot:rank_memory_bytes",
                    unit="bytes",
                    queries=(
                        (
                            "{{engine}} {{rank}}",
                            f"max by (engine, rank) (warmroot:rank_memory_bytes{SELECTED})",
                        ),
                    ),
                ),
                Panel(
                    title="Steps of ranks",
                    description="A rank that stands still holds its gang up. warmroot:rank_steps_total",
                    unit="short",
                    queries=(
                        (
                            "{{engine}} {{rank}}",
                            f"max by (engine, rank) (rate(warmroot:rank_steps_total{SELECTED}[$__rate_interval]))",
                        ),
                    ),
                ),
                Panel(
                    title="What they are",
                    description="KV format, weights, kernels and node of each. warmroot:replica_info",
                    unit="short",
                    queries=(
                        (
                            "{{engine}} {{kv_format}} {{weights_format}} {{weights_version}}",
                            "max by (engine, kv_format, weights_format, weights_version) "
                            f"(warmroot:replica_info{SELECTED})",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
