"""What an engine has counted since its start: replicas tell it twice a second, beside the load of every word."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .histogram import HistogramCounts, merged

STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Bounds of the histogram of tokens in a step: powers of two, as vLLM's."""


def _no_steps() -> HistogramCounts:
    return merged(STEP_TOKENS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Counters of one incarnation of a replica; ``cached_blocks`` alone may fall."""

    steps: HistogramCounts = field(default_factory=_no_steps)
    """Steps by the tokens that were computed in each."""
    busy_s: float = 0.0
    """Seconds in which a step was computed."""
    generation_tokens: int = 0
    """Tokens sampled and kept."""
    preemptions: int = 0
    """Running requests that gave their blocks back, to be computed once more."""
    evicted_blocks: int = 0
    """Cached blocks that made room for others."""
    cached_blocks: int = 0
    """Blocks that nobody holds and the prefix cache keeps."""


def together(parts: Sequence[EngineCounts]) -> EngineCounts:
    """Of several engines that step together: each part of a step counts as one."""
    return EngineCounts(
        steps=merged(STEP_TOKENS, (part.steps for part in parts)),
        busy_s=max((part.busy_s for part in parts), default=0.0),
        generation_tokens=sum(part.generation_tokens for part in parts),
        preemptions=sum(part.preemptions for part in parts),
        evicted_blocks=sum(part.evicted_blocks for part in parts),
        cached_blocks=sum(part.cached_blocks for part in parts),
    )
