"""Bytes that the ranks of a gang put on the wire for given plans, by the kinds that they count them in."""

from collections import Counter
from collections.abc import Sequence

from ....actors.parallel.traffic import Kind
from ....cluster.parallel_layout import ParallelLayout
from ....cluster.step_traffic import Purpose, step_traffic
from .executor_clock import PlanSize

ACTIVATION_BYTES = 4
"""On a CPU activations are float32."""
KINDS: dict[Purpose, Kind] = {
    "embedding": "all_reduce",
    "qk_norm": "all_reduce",
    "attention": "all_reduce",
    "mlp": "all_reduce",
    "counts": "counts",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
    "hidden": "hop",
    "logits": "all_gather",
}


def predicted_bytes(
    layout: ParallelLayout, steps: Sequence[Sequence[PlanSize]], activation_bytes: int
) -> list[dict[Kind, float]]:
    """By rank. ``steps`` have the size of each attention group's plan; see ``step_traffic`` for what is exact."""
    return [_of_rank(layout, rank, steps, activation_bytes) for rank in range(layout.topology.world_size)]


def _of_rank(
    layout: ParallelLayout, rank: int, steps: Sequence[Sequence[PlanSize]], activation_bytes: int
) -> dict[Kind, float]:
    group = layout.ranks[rank].place.dp_rank
    total: Counter[Kind] = Counter()
    for plans in steps:
        tokens, sampled = plans[group]
        for transfer in step_traffic(layout, rank, tokens=tokens, sampled=sampled, activation_bytes=activation_bytes):
            total[KINDS[transfer.purpose]] += transfer.count * transfer.payload  # pyright: ignore[reportArgumentType]
    return {kind: value for kind, value in total.items() if value}
