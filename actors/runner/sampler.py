"""From logits to tokens, for a batch of requests that each ask for something else."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...cluster.messages import TokenLogprob
from .choice import Choice, choice_for
from .constraints import constrain
from .logprobs import logprobs
from .rows import SamplingRow, changes_logits, is_plain


class Sampled(NamedTuple):
    """One token per row, and its log-probability where the row asks for it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Stateless but for the model's end tokens, which ``min_tokens`` masks."""

    def __init__(self, eos_token_ids: tuple[int, ...], choice: Choice | None = None) -> None:
        """``choice`` defaults to the one for a CPU."""
        self._eos_token_ids = eos_token_ids
        self._choice = choice or choice_for(torch.device("cpu"))

    def greedy(self, logits: torch.Tensor) -> Sampled:
        """The likeliest token of each row [R, vocab], for rows that ask for nothing else."""
        return Sampled(self._choice.likeliest(logits).tolist(), [None] * len(logits))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow], choice: Choice | None = None) -> Sampled:
        """Logits [R, vocab] float32, changed in place. A row costs only what it asks for.

        ``choice`` takes the place of the sampler's own.
        """
        if all(is_plain(row.params) for row in rows):
            return self.greedy(logits)
        reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        # Reported are the model's own log-probabilities: keep them from what follows.
        raw = logits[reported] if reported else logits
        if any(changes_logits(row.params) for row in rows):
            constrain(logits, rows, self._eos_token_ids)
        token_ids = (choice or self._choice).choose(logits, rows)
        entries: list[TokenLogprob | None] = [None] * len(rows)
        if reported:
            wanted = [rows[index].params.logprobs or 0 for index in reported]
            for index, entry in zip(reported, logprobs(raw, token_ids[reported], wanted), strict=True):
                entries[index] = entry
        return Sampled(token_ids.tolist(), entries)
