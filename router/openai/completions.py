"""Bodies of ``POST /v1/completions``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ...cluster.errors import InvalidRequestError
from ...cluster.sampling_params import SamplingParams
from .bodies import ResponseBody
from .protocol import GenerationRequest, TopLogprobs, UsageBody

DEFAULT_MAX_TOKENS = 16


def _form(prompt: Any) -> str:
    """Which form of prompt is meant, from its first item: trying all of them takes 10 ms for 32,000 ids."""
    if not isinstance(prompt, list) or not prompt:
        return "list of texts" if isinstance(prompt, list) else "text"
    return {str: "list of texts", list: "list of id lists"}.get(type(prompt[0]), "ids")


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("list of texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("list of id lists")],
    Discriminator(_form),
]


def prompts_of(prompt: Prompt, field: str) -> list[str | list[int]]:
    """The prompts one by one. Raises InvalidRequestError naming ``field`` for an empty one."""
    prompts = _as_list(prompt)
    if not prompts or any(not one for one in prompts):
        raise InvalidRequestError(f"{field} must not be empty", param=field)
    return prompts


def _as_list(prompt: Prompt) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token_id for token_id in prompt if isinstance(token_id, int)]]
    return [one for one in prompt if not isinstance(one, int)]


class CompletionRequest(GenerationRequest):
    """OpenAI's completion request with vLLM's extensions."""

    prompt: Prompt
    """A text, token ids, or a list of either."""
    echo: bool | None = None
    """Put the prompt before the output."""
    logprobs: int | None = TopLogprobs
    """Report the log-probability of each token and of so many likeliest ones."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens (such as BOS) to text prompts."""
    suffix: str | None = None
    """Not supported."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**GenerationRequest.unsupported, "suffix": ("",)}

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises InvalidRequestError for an empty one."""
        return prompts_of(self.prompt, "prompt")

    def to_sampling_params(self) -> SamplingParams:
        """What the sampler is asked for. Raises InvalidRequestError naming the field at fault."""
        echoed = self.logprobs if self.echo and self.logprobs is not None else None
        return self.sampling_params(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if self.prompt_logprobs is not None else echoed,
        )


class CompletionLogprobs(ResponseBody):
    """Log-probabilities of a choice, position by position."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseBody):
    """One completion: number ``i`` of prompt ``p`` has the index ``p * n + i``."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    """``stop``, ``length`` or ``abort``; null while it streams."""
    stop_reason: int | str | None = None
    """The stop text or token id that ended it."""
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionBody(ResponseBody):
    """The response without ``stream``; a stream's events have the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
