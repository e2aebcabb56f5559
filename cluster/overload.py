"""How much may wait before new requests are refused."""

from pydantic import Field

from .config_section import Section


class OverloadConfig(Section):
    """What happens when more is asked than can be done."""

    max_queue_wait: float = Field(30.0, ge=0)
    """Seconds that requests may wait for a replica, by prediction; above it new ones get 429 with the time after which
    there is room. 0: no limit."""
    max_num_queued_tokens: int | None = Field(None, ge=1)
    """Uncached prompt tokens that may wait in an ingress, and in a replica. Default: what max_queue_wait allows, at the
    measured rate."""

    def replica_tokens(self, prefill_tokens_per_s: float) -> int | None:
        """Tokens that may wait in a replica of that speed; None: any number."""
        if self.max_num_queued_tokens is not None or not self.max_queue_wait:
            return self.max_num_queued_tokens
        return max(1, int(self.max_queue_wait * prefill_tokens_per_s))
