"""How the number of replicas follows the work; ``scaling.py`` decides by it."""

from pydantic import Field

from .config_section import Section


class AutoscalingConfig(Section):
    """How many replicas there are, where their number follows the work."""

    max_replicas: int | None = Field(None, ge=1)
    """Copies of the model at most. Given, their number follows the work; default: there are num_replicas, always."""
    min_replicas: int = Field(1, ge=0)
    """Copies of the model at least. 0: none while nobody asks; the first request then waits until one has started."""
    target_queue_wait: float = Field(0.5, gt=0)
    """Seconds of prefill that may wait for each replica, by prediction; above it there are to be more replicas."""
    ttft_slo: float = Field(2.0, ge=0)
    """Seconds to the first token of nine requests in ten, of those whose prompt alone takes less; 0: any."""
    itl_slo: float = Field(0.0, ge=0)
    """Seconds between two tokens, on average; more replicas help unless a single stream takes longer. 0: any."""
    max_kv_usage: float = Field(0.8, gt=0, le=1)
    """Share of all replicas' KV memory that running requests may hold."""
    upscale_delay: float = Field(5.0, ge=0)
    """Seconds for which more replicas must be needed before they are started; the first one is started at once."""
    downscale_delay: float = Field(120.0, ge=0)
    """Seconds for which fewer replicas must do before some are drained and stopped."""
    scale_to_zero_delay: float = Field(600.0, ge=0)
    """Seconds without any request before the last replica is stopped, where min_replicas is 0."""
    max_upscale_step: int | None = Field(None, ge=1)
    """Replicas that are started at once. Default: as many as there are."""
    max_downscale_step: int = Field(1, ge=1)
    """Replicas that are stopped at once."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.max_replicas is None:
            given = sorted(self.model_fields_set - {"max_replicas"})
            return (given[0], "applies where max_replicas is given") if given else None
        if self.min_replicas > self.max_replicas:
            return "min_replicas", f"{self.min_replicas} is more than max_replicas ({self.max_replicas})"
        return None
