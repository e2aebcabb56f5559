"""Changes to logits that single requests ask for: masks, bias and penalties, each touching only its own tokens.

In vLLM's order: the grammar, allowed tokens, bad words, minimum length, bias, penalties. Ids outside the vocabulary are
passed over: requests are checked where they enter, and one that was not must not end the others of its batch.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from .rows import SamplingRow, changes_logits, ends_with

_BANNED = float("-inf")


def constrain(logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: tuple[int, ...]) -> None:
    """Change [R, vocab] logits in place."""
    for row_logits, row in zip(logits, rows, strict=True):
        if changes_logits(row.params):
            _constrain(row_logits, row, eos_token_ids)


def _constrain(logits: torch.Tensor, row: SamplingRow, eos_token_ids: tuple[int, ...]) -> None:
    params, vocab = row.params, len(logits)
    if row.guide is not None:
        row.guide.mask(logits, row.output)
    if params.allowed_token_ids is not None:
        _allow_only(logits, _within(params.allowed_token_ids, vocab))
    banned = [word[-1] for word in params.bad_words_token_ids if word and ends_with(row.output, word[:-1])]
    if row.num_output < params.min_tokens:
        banned += [*eos_token_ids, *params.stop_token_ids]
    if banned:
        logits[_within(banned, vocab)] = _BANNED
    if params.logit_bias:
        biased = _within(params.logit_bias, vocab)
        logits[biased] += torch.tensor([params.logit_bias[token_id] for token_id in biased], device=logits.device)
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, row.token_ids, params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.num_output:
        _penalize_output(logits, row, params.presence_penalty, params.frequency_penalty)


def _within(token_ids: Iterable[int], vocab: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab]


def _allow_only(logits: torch.Tensor, token_ids: list[int]) -> None:
    kept = logits[token_ids]
    logits.fill_(_BANNED)
    logits[token_ids] = kept


def _penalize_repetition(logits: torch.Tensor, token_ids: np.ndarray, penalty: float) -> None:
    """Keskar et al., "CTRL", 2019: towards less likely, whatever the sign, once per token seen."""
    seen = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
    scores = logits[seen]
    # A token that occurs twice is written twice, with the same value.
    logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)


def _penalize_output(logits: torch.Tensor, row: SamplingRow, presence: float, frequency: float) -> None:
    token_ids, counts = np.unique(row.output, return_counts=True)
    penalty = torch.from_numpy((counts * frequency + presence).astype(np.float32)).to(logits.device)
    logits[torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)] -= penalty
