"""What only the tokenizer's side can check and fill in: lengths, token ids and words."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..cluster.errors import ContextTooLongError, InvalidRequestError
from ..cluster.sampling_params import SamplingParams
from ..kv_store.hashing import pack_tokens
from .tokenizer import Tokenizer

MOST_PRIORITY = 2**31 - 1
_UNSIGNED = np.dtype("<u4")
"""A negative id is a very large one."""


def packed_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> bytes:
    """The prompt as ``hashing.pack_tokens`` makes it.

    Raises InvalidRequestError (``prompt``) when it is empty or has ids outside the vocabulary.
    """
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt must have at least one token", param="prompt")
    try:
        packed = pack_tokens(prompt_token_ids)
    except (OverflowError, TypeError):
        packed = b""
    if not packed or np.frombuffer(packed, dtype=_UNSIGNED).max() >= vocab_size:
        _check_ids(prompt_token_ids, vocab_size, "prompt")
    return packed


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError naming the field that has token ids outside the vocabulary."""
    _check_ids(params.logit_bias, vocab_size, "logit_bias")
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")


def check_priority(priority: int) -> None:
    """Raises InvalidRequestError for one that no queue orders by and no wire carries."""
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise InvalidRequestError(f"priority must be between {-MOST_PRIORITY} and {MOST_PRIORITY}", param="priority")


def engine_params(
    params: SamplingParams, tokenizer: Tokenizer, num_prompt: int, max_model_len: int, seed: int
) -> SamplingParams:
    """The parameters of a single sequence: ``max_tokens`` is set, and text is none of the engine's business.

    Raises ContextTooLongError when prompt and output do not fit.
    """
    return replace(
        params,
        max_tokens=_max_tokens(params.max_tokens, num_prompt, max_model_len),
        bad_words=(),
        bad_words_token_ids=params.bad_words_token_ids + _bad_words(params.bad_words, tokenizer),
        stop=(),
        seed=seed,
        n=1,
        best_of=None,
    )


def _max_tokens(wanted: int | None, num_prompt: int, max_model_len: int) -> int:
    left = max_model_len - num_prompt
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if left < 0 or (left == 0 and wanted != 0):
        shorten = "Please reduce the length of the prompt."
        raise ContextTooLongError(f"{limit}your prompt has {num_prompt} tokens. {shorten}", param="prompt")
    if wanted is None:
        return left
    if wanted > left:
        parts = f"({num_prompt} in the prompt, {wanted} in the completion)"
        shorten = "Please reduce the length of the prompt or completion."
        requested = f"you requested {num_prompt + wanted} tokens {parts}. {shorten}"
        raise ContextTooLongError(limit + requested, param="max_tokens")
    return wanted


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the beginning of a text, and after a space."""
    spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
    ids = [tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings]
    return tuple(dict.fromkeys(sequence for sequence in ids if sequence))


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        reason = f"token id {wrong} in {param} is outside the vocabulary of {vocab_size} tokens"
        raise InvalidRequestError(reason, param=param)
