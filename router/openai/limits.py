"""Holds requests against the server's ``RequestLimits``. Every refusal names the field, its size and the limit."""

from collections.abc import Sequence, Sized
from dataclasses import replace

from ...cluster.errors import InvalidRequestError
from ...cluster.request_limits import RequestLimits
from ...cluster.sampling_params import SamplingParams
from .chat import ChatCompletionRequest, ChatTemplateOptions
from .protocol import GenerationRequest

_COUNTED = {
    "logit_bias": "max_logit_bias",
    "bad_words": "max_bad_words",
    "allowed_token_ids": "max_token_ids",
    "stop_token_ids": "max_token_ids",
}
"""Fields that are lists or mappings, with the limit of each."""
_BOUNDED = {
    "n": "max_completions",
    "best_of": "max_completions",
    "logprobs": "max_logprobs",
    "top_logprobs": "max_logprobs",
    "prompt_logprobs": "max_logprobs",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields that are numbers, with the limit of each."""


def check_fields(body: GenerationRequest, limits: RequestLimits) -> None:
    """What both APIs have. Raises InvalidRequestError."""
    given = body.model_fields_set
    for field in given & _COUNTED.keys():
        _check(field, _size(getattr(body, field)), _COUNTED[field], limits, "entries")
    for field in given & _BOUNDED.keys():
        value = getattr(body, field)
        if isinstance(value, int) and not isinstance(value, bool):  # chat's logprobs is a bool
            _check(field, value, _BOUNDED[field], limits)
    if body.stop is not None:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        _check("stop", len(stop), "max_stop_strings", limits, "texts")
        _check("stop", max(map(len, stop), default=0), "max_stop_length", limits, "characters")
    if isinstance(body, ChatCompletionRequest):
        _check_sequences(1, body, limits)


def check_messages(body: ChatTemplateOptions, limits: RequestLimits) -> None:
    """Raises InvalidRequestError."""
    _check("messages", len(body.messages), "max_messages", limits, "messages")
    check_chars("messages", [text for message in body.messages for text in message.texts()], limits)
    if body.tools:
        check_chars("tools", [tool.model_dump_json() for tool in body.tools], limits)


def check_prompts(prompts: Sequence[str | list[int]], body: GenerationRequest, limits: RequestLimits) -> None:
    """Raises InvalidRequestError."""
    _check("prompt", len(prompts), "max_prompts", limits, "prompts")
    check_chars("prompt", [prompt for prompt in prompts if isinstance(prompt, str)], limits)
    _check_sequences(len(prompts), body, limits)


def check_chars(field: str, texts: Sequence[str], limits: RequestLimits) -> None:
    """Raises InvalidRequestError for texts that are longer than they may be altogether."""
    _check(field, sum(map(len, texts)), "max_prompt_chars", limits, "characters")


def with_output_limit(params: SamplingParams, limits: RequestLimits) -> SamplingParams:
    """``params`` of a request that leaves its length open, which gets no more than others may ask for."""
    if params.max_tokens is None and limits.max_output_tokens is not None:
        return replace(params, max_tokens=max(limits.max_output_tokens, params.min_tokens))
    return params


def _check_sequences(num_prompts: int, body: GenerationRequest, limits: RequestLimits) -> None:
    field = "best_of" if body.best_of is not None else "n"
    _check(field, num_prompts * (body.best_of or body.n or 1), "max_total_completions", limits, "sequences")


def _check(field: str, size: int, limit: str, limits: RequestLimits, unit: str = "") -> None:
    most: int | None = getattr(limits, limit)
    if most is not None and size > most:
        asked = f"{size} {unit}".strip()
        raise InvalidRequestError(
            f"{field}: {asked} is more than the {most} that this server takes ({limit})", param=field
        )


def _size(value: Sized | None) -> int:
    return 0 if value is None else len(value)
