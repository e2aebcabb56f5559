"""Wire forms of how busy a replica is and what it has done: lists of numbers for msgpack.

What does not decode raises TypeError or ValueError.
"""

from typing import Any

from ..cluster.engine_counts import STEP_TOKENS, EngineCounts
from ..cluster.histogram import HistogramCounts
from ..cluster.messages import FirstTokenReport, Load


def load_to_wire(load: Load) -> list[int]:
    """Goes with every word of a replica, so what is zero at the end is left out."""
    return [
        load.running,
        load.waiting,
        load.waiting_tokens,
        load.kv_used_blocks,
        load.kv_total_blocks,
        load.max_num_seqs,
        *((load.num_drafts, load.num_draft_tokens, *load.accepted_by_place) if load.num_drafts else ()),
    ]


def load_from_wire(wire: Any) -> Load:
    """Inverse of ``load_to_wire``."""
    numbers = [_int(n) for n in wire]
    running, waiting, waiting_tokens, kv_used_blocks, kv_total_blocks, max_num_seqs, *drafts = numbers
    num_drafts, num_draft_tokens, *accepted = drafts or (0, 0)
    return Load(
        running=running,
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        kv_used_blocks=kv_used_blocks,
        kv_total_blocks=max(1, kv_total_blocks),
        max_num_seqs=max(1, max_num_seqs),
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        accepted_by_place=tuple(accepted),
    )


def counts_to_wire(counts: EngineCounts) -> list[Any]:
    """Goes with every pong."""
    return [
        counts.busy_s,
        counts.generation_tokens,
        counts.preemptions,
        counts.evicted_blocks,
        counts.cached_blocks,
        counts.steps.total,
        *counts.steps.counts,
    ]


def counts_from_wire(wire: list[Any]) -> EngineCounts:
    """Inverse of ``counts_to_wire``."""
    busy_s, generation_tokens, preemptions, evicted_blocks, cached_blocks, total, *steps = wire
    if len(steps) != len(STEP_TOKENS) + 1:
        raise ValueError(f"a histogram of {len(steps)} buckets")
    return EngineCounts(
        steps=HistogramCounts(STEP_TOKENS, tuple(_int(count) for count in steps), float(total)),
        busy_s=float(busy_s),
        generation_tokens=_int(generation_tokens),
        preemptions=_int(preemptions),
        evicted_blocks=_int(evicted_blocks),
        cached_blocks=_int(cached_blocks),
    )


def report_from_wire(queue_s: Any, prefill_s: Any) -> FirstTokenReport:
    """What the engine says of a first token."""
    return FirstTokenReport(queue_s=float(queue_s), prefill_s=float(prefill_s))


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"int expected, got {type(value).__name__}")
    return value
