"""What an engine counts of its steps."""

from ...cluster.engine_counts import STEP_TOKENS, EngineCounts
from ...cluster.histogram import Histogram
from ...kv_store.prefix_cache import PrefixCache
from .scheduler import Scheduler


class Counters:
    """Since the start."""

    def __init__(self) -> None:
        self.num_generated = 0
        """Tokens sampled and kept."""
        self._steps = Histogram(STEP_TOKENS)
        self._busy_s = 0.0

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` took ``seconds``."""
        self._steps.observe(num_tokens)
        self._busy_s += seconds

    def counts(self, scheduler: Scheduler, cache: PrefixCache) -> EngineCounts:
        """With what these two have counted."""
        return EngineCounts(
            steps=self._steps.counts(),
            busy_s=self._busy_s,
            generation_tokens=self.num_generated,
            preemptions=scheduler.num_preemptions,
            evicted_blocks=cache.num_evicted,
            cached_blocks=cache.pool.num_idle,
        )
