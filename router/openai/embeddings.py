"""Bodies of ``POST /v1/embeddings``."""

from typing import Literal

from pydantic import Field

from ...cluster.sampling_params import SamplingParams
from ..request_checks import MOST_PRIORITY
from .bodies import RequestBody, ResponseBody
from .completions import Prompt, prompts_of
from .protocol import GenerationRequest


class EmbeddingRequest(RequestBody):
    """OpenAI's embedding request with vLLM's extensions."""

    model: str | None = None
    """Name of a served model; without it, the only one."""
    input: Prompt
    """A text, token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers (the default), or float32 in base64."""
    dimensions: int | None = Field(None, ge=1)
    """Keep only the first ones."""
    user: str | None = None
    """Accepted and not used."""

    pooling: Literal["last", "mean"] | None = None
    """The hidden state of the last token (the default), or the mean of all; both from behind the final norm."""
    normalize: bool = True
    """Scale to length 1."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens (such as BOS) to texts."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep only so many tokens of each input; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that truncation cuts. Default left."""
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    """Lower runs first."""
    timeout: float | None = Field(None, gt=0, le=1e6)
    """Seconds within which the answer must be there."""
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:\-]{1,128}$")
    """Used in the response's id; the header ``x-request-id`` comes first."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Cached prefixes are shared only between requests with the same salt."""
    session_id: str | None = Field(None, min_length=1, max_length=256)
    """Requests of a session go to the same replica if it can take them."""

    def prompts(self) -> list[str | list[int]]:
        """The inputs one by one. Raises InvalidRequestError for an empty one."""
        return prompts_of(self.input, "input")

    def queued(self) -> GenerationRequest:
        """The request for nothing but the prompts."""
        shared = GenerationRequest.model_fields.keys() & EmbeddingRequest.model_fields.keys()
        return GenerationRequest.model_validate({name: getattr(self, name) for name in shared})

    def to_sampling_params(self) -> SamplingParams:
        """A prompt, and nothing after it."""
        return SamplingParams(max_tokens=0, pooling=self.pooling or "last")


class EmbeddingData(ResponseBody):
    """Of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """With ``base64``, float32 in little-endian order."""


class EmbeddingUsage(ResponseBody):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseBody):
    """The response."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage
