"""What an engine counts of its steps, and how busy it is."""

from ...cluster.engine_counts import STEP_TOKENS, EngineCounts
from ...cluster.histogram import Histogram
from ...cluster.messages import Load
from ...kv_store.prefix_cache import PrefixCache
from .scheduler import Scheduler
from .speculation import DraftCounts


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


def load_of(scheduler: Scheduler, drafts: DraftCounts | None, max_num_seqs: int) -> Load:
    """What the router needs to know; ``drafts``: of an engine that drafts."""
    running, waiting, pool = scheduler.running, scheduler.waiting, scheduler.cache.pool
    drafts = drafts or DraftCounts()
    missing = (len(request.tokens) - request.num_computed for request in running)
    return Load(
        running=len(running),
        waiting=len(waiting),
        waiting_tokens=waiting.num_tokens + sum(tokens for tokens in missing if tokens > 1),
        kv_used_blocks=pool.num_used,
        kv_total_blocks=pool.num_blocks - 1,
        max_num_seqs=max_num_seqs,
        num_drafts=drafts.drafts,
        num_draft_tokens=drafts.draft_tokens,
        accepted_by_place=tuple(drafts.accepted_by_place),
    )
