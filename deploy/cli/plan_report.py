"""The plan of a replica as JSON: the model's facts, what fits, and one object per rank."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...cluster.capacity import CapacityPlan, RankPlan
from ...cluster.model_spec import ModelSpec
from ...cluster.step_traffic import Transfer, step_traffic
from ...cluster.topology import Topology


@dataclass(frozen=True, slots=True)
class Step:
    """A step in which ``tokens`` sequences decode, in each group with requests of its own."""

    tokens: int
    activation_bytes: int
    """Of one element of a hidden state."""


def describe(
    plan: CapacityPlan, formats: Mapping[str, CapacityPlan], step: Step, fit: Topology | None
) -> dict[str, Any]:
    """The plan itself, its main numbers in every KV format, and the ranks. Sizes are in bytes.

    Those of one rank stand for the tightest one, which decides how much fits.
    """
    tightest, topology = plan.tightest, plan.layout.topology
    return {
        **_model(plan.layout.spec),
        **asdict(topology),
        "num_redundant_experts": _redundant(plan),
        "devices": topology.world_size,
        "data_parallel_groups": topology.attention_dp,
        "dtype": plan.needs.weights.name,
        "memory_bytes": plan.needs.memory_bytes,
        "weight_bytes": tightest.weight_bytes,
        "copied_weight_bytes": tightest.layout.copied_bytes(plan.needs.weights),
        "draft_weight_bytes": tightest.draft_weight_bytes,
        "weight_bytes_all_devices": sum(rank.weight_bytes for rank in plan.ranks),
        "kv_format": plan.needs.kv_format.name,
        "kv_token_bytes": tightest.kv_token_bytes,
        "kv_token_bytes_per_layer": tightest.kv_token_bytes / len(tightest.layout.layers),
        "kv_token_bytes_all_devices": plan.kv_token_bytes,
        "kv_sequence_bytes": plan.sequence_bytes(tightest),
        "kv_bytes": tightest.kv_bytes,
        "page_bytes": tightest.page_bytes,
        "open_page_bytes": tightest.open_page_bytes,
        "open_pages": _open_pages(tightest),
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.needs.max_model_len,
        "max_sequences": plan.max_sequences,
        "max_cached_tokens": plan.max_cached_tokens,
        "fits": plan.limit is None,
        "limit": plan.limit,
        "missing_bytes": plan.missing_bytes,
        "smallest_fit": None if fit is None else asdict(fit),
        "kv_formats": {name: _format(other) for name, other in formats.items()},
        "step": asdict(step),
        "ranks": [_rank(plan, rank, step) for rank in plan.ranks],
    }


def _model(spec: ModelSpec) -> dict[str, Any]:
    windows = [window for window in spec.layer_windows if window is not None]
    return {
        "architecture": spec.architecture,
        "parameters": spec.num_parameters,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "latent_size": None if spec.mla is None else spec.mla.cached_size,
        "num_experts": 0 if spec.moe is None else spec.moe.num_experts,
        "experts_per_token": 0 if spec.moe is None else spec.moe.experts_per_token,
        "sparse_layers": 0 if spec.moe is None else sum(spec.moe.sparse_layers),
        "sliding_layers": len(windows),
        "sliding_window": max(windows, default=None),
    }


def _open_pages(rank: RankPlan) -> int:
    """Most that can be open at a time."""
    return min(rank.open_pages, rank.num_blocks) if rank.open_page_bytes else 0


def _redundant(plan: CapacityPlan) -> int:
    placement = plan.layout.placement
    return 0 if placement is None else placement.num_ranks * placement.slots_per_rank - placement.num_experts


def _format(plan: CapacityPlan) -> dict[str, Any]:
    return {
        "served": plan.layout.spec.mla is None or not plan.needs.kv_format.is_quantised,
        "kv_token_bytes": plan.tightest.kv_token_bytes,
        "kv_sequence_bytes": plan.sequence_bytes(plan.tightest),
        "num_blocks": plan.num_blocks,
        "max_sequences": plan.max_sequences,
    }


def _rank(plan: CapacityPlan, rank: RankPlan, step: Step) -> dict[str, Any]:
    own = rank.layout
    transfers = step_traffic(
        plan.layout,
        own.place.rank,
        tokens=step.tokens,
        sampled=step.tokens,
        activation_bytes=step.activation_bytes,
    )
    return {
        **asdict(own.place),
        "first_layer": own.layers.start,
        "num_layers": len(own.layers),
        "has_embedding": own.has_embedding,
        "has_head": own.has_head,
        "samples": own.samples,
        "heads": [own.heads.queries.start, own.heads.queries.stop],
        "kv_heads": [own.heads.kv.start, own.heads.kv.stop],
        "experts": list(own.experts),
        "parameters": own.num_parameters,
        "weight_bytes": rank.weight_bytes,
        "copied_weight_bytes": own.copied_bytes(plan.needs.weights),
        "draft_weight_bytes": rank.draft_weight_bytes,
        "kv_token_bytes": rank.kv_token_bytes,
        "page_bytes": rank.page_bytes,
        "open_page_bytes": rank.open_page_bytes,
        "kv_bytes": rank.kv_bytes,
        "num_blocks": rank.num_blocks,
        "sends": [_transfer(transfer, step) for transfer in transfers],
    }


def _transfer(transfer: Transfer, step: Step) -> dict[str, Any]:
    """``bytes`` are those of the tensors handed over; what leaves the rank is more or less, by the operation."""
    return {
        "purpose": transfer.purpose,
        "operation": transfer.operation,
        "group_size": transfer.group_size,
        "operations": transfer.count,
        "bytes_per_layer": transfer.layer_bytes,
        "bytes_per_token": transfer.step_bytes / step.tokens,
        "bytes_per_step": transfer.step_bytes,
        "sent_bytes_per_step": transfer.sent_bytes,
    }
