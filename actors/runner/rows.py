"""One row of logits and everything that decides which token comes of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...cluster.sampling_params import SamplingParams
from .arrays import Int32s

if TYPE_CHECKING:
    from .guides import Guide


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sequence behind a row of logits."""

    params: SamplingParams
    seed: int
    num_prompt: int
    token_ids: Int32s
    """Prompt and output so far."""
    guide: "Guide | None" = None
    """Of a sequence whose output has a grammar."""

    @property
    def output(self) -> Int32s:
        """Output tokens so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Index of the token about to be sampled."""
        return len(self.token_ids) - self.num_prompt


def is_plain(params: SamplingParams) -> bool:
    """Whether the likeliest token is all that is asked for."""
    return params.greedy and params.logprobs is None and not changes_logits(params)


def changes_logits(params: SamplingParams) -> bool:
    """Whether anything is added to the model's logits or masked in them."""
    return bool(
        params.needs_history
        or params.logit_bias
        or params.min_tokens
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.grammar is not None
    )


def ends_with(tokens: Int32s, suffix: tuple[int, ...]) -> bool:
    """Whether ``tokens`` end with ``suffix``."""
    return not suffix or np.array_equal(tokens[-len(suffix) :], suffix)
