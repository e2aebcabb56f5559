"""What a single request may ask for."""

from pydantic import Field

from .config_section import Bytes, Section
from .sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS


class RequestLimits(Section):
    """Limits of a single request; one that exceeds them gets 400, 413 or 431 naming field and limit."""

    max_header_bytes: Bytes = Field(32 * 1024, gt=0)
    """Larger headers get 431."""
    max_json_values: int = Field(2_000_000, ge=1024)
    """Commas and brackets in a body, which tell how long reading it takes; more get 413."""
    max_prompt_chars: int = Field(8_000_000, ge=1)
    """Characters to tokenize for one request, in all its prompts or messages."""
    max_messages: int = Field(8192, ge=1)
    """Messages of a conversation."""
    max_prompts: int = Field(2048, ge=1)
    """Prompts of one completion request."""
    max_completions: int = Field(MAX_COMPLETIONS, ge=1, le=MAX_COMPLETIONS)
    """Completions per prompt: n and best_of."""
    max_total_completions: int = Field(2048, ge=1)
    """Prompts times completions."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Tokens to generate for each completion; a request that leaves it open gets no more. Default: the context."""
    max_logprobs: int = Field(MAX_LOGPROBS, ge=0, le=MAX_LOGPROBS)
    """Alternatives per token in logprobs, top_logprobs and prompt_logprobs."""
    max_stop_strings: int = Field(64, ge=0)
    """Texts in stop."""
    max_stop_length: int = Field(1024, ge=1)
    """Characters of each of them."""
    max_logit_bias: int = Field(4096, ge=0)
    """Tokens in logit_bias."""
    max_bad_words: int = Field(1024, ge=0)
    """Words in bad_words."""
    max_token_ids: int = Field(131072, ge=0)
    """Token ids in allowed_token_ids and in stop_token_ids."""
    max_grammar_chars: int = Field(65536, ge=0)
    """Characters of a schema, expression or grammar that the output is to keep to; also of all tools together."""
    max_schema_values: int = Field(4096, ge=1)
    """Values in a JSON schema."""
