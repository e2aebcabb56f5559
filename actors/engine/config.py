"""The engine's settings."""

from dataclasses import dataclass

from ...cluster.errors import ConfigError
from ...cluster.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and policies of one engine; names and meanings follow vLLM where it has them."""

    max_model_len: int
    """Prompt and output tokens of one sequence."""
    max_num_seqs: int = 256
    """Sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step."""
    max_prefill_chunk: int | None = None
    """Prompt tokens computed in one step while others decode: bounds inter-token latency. None: no bound of its own."""
    max_num_queued_reqs: int = 1024
    """Waiting requests beyond which new ones are refused with OverloadedError."""
    max_num_queued_tokens: int | None = None
    """Uncached tokens of waiting requests beyond which new ones are refused, too. One request may always wait."""
    prefill_tokens_per_s: float = 0.0
    """Measured at start: what waiting times are guessed from at first; 0: not known."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal prefixes."""
    share_partial_blocks: bool = True
    """Reuse the first tokens of a block too where others follow. Not for quantised KV, whose blocks are read as one."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence unless it asks for ``ignore_eos``."""
    vocab_size: int | None = None
    """Prompts with token ids outside are refused; None: not checked."""
    max_overtakes: int = 16
    """How many requests with a warmer prefix may go before one that came earlier."""
    warm_candidates: int = 32
    """How many waiting requests compete with the warmth of their prefixes."""
    priority_age_s: float = 30.0
    """Seconds of waiting that weigh as much as one step of priority."""
    speculation: SpeculativeConfig | None = None
    """Draft tokens ahead."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "warm_candidates", "max_num_queued_reqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.max_num_queued_tokens is not None and self.max_num_queued_tokens < 1:
            raise ConfigError(
                f"max_num_queued_tokens must be at least 1, got {self.max_num_queued_tokens}",
                param="max_num_queued_tokens",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Otherwise decodes could use up every step and a prefill would starve.
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_num_seqs ({self.max_num_seqs})",
                param="max_num_batched_tokens",
            )
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            raise ConfigError(
                f"max_prefill_chunk must be at least 1, got {self.max_prefill_chunk}", param="max_prefill_chunk"
            )
        if self.max_overtakes < 0 or self.priority_age_s < 0:
            raise ConfigError("max_overtakes and priority_age_s must not be negative", param="max_overtakes")
