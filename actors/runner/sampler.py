"""From logits to tokens, for a batch of requests that each ask for something else."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...cluster.messages import TokenLogprob
from .constraints import constrain
from .draw import draw, uniform
from .filters import Filters, thresholds
from .logprobs import logprobs
from .rows import SamplingRow, changes_logits, is_plain


class Sampled(NamedTuple):
    """One token per row, and its log-probability where the row asks for it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Stateless but for the model's end tokens, which ``min_tokens`` masks."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def greedy(self, logits: torch.Tensor) -> Sampled:
        """The likeliest token of each row [R, vocab], for rows that ask for nothing else."""
        return Sampled(logits.argmax(1).tolist(), [None] * len(logits))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """Logits [R, vocab] float32, changed in place. A row costs only what it asks for."""
        if all(is_plain(row.params) for row in rows):
            return self.greedy(logits)
        reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        # Reported are the model's own log-probabilities: keep them from what follows.
        raw = logits[reported] if reported else logits
        if any(changes_logits(row.params) for row in rows):
            constrain(logits, rows, self._eos_token_ids)
        token_ids = self._choose(logits, rows)
        entries: list[TokenLogprob | None] = [None] * len(rows)
        if reported:
            wanted = [rows[index].params.logprobs or 0 for index in reported]
            for index, entry in zip(reported, logprobs(raw, token_ids[reported], wanted), strict=True):
                entries[index] = entry
        return Sampled(token_ids.tolist(), entries)

    def _choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if len(drawn) == len(rows):
            return _draw(logits, rows)
        token_ids = logits.argmax(1)
        if drawn:
            token_ids[drawn] = _draw(logits[drawn], [rows[index] for index in drawn])
        return token_ids


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Token ids [R] drawn from logits [R, vocab], which are overwritten."""
    device = logits.device
    params = [row.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params], device=device)
    # The best weighs 1 whatever the temperature, so nothing overflows.
    weights = logits.sub_(logits.amax(1, keepdim=True)).div_(temperature[:, None]).exp_()
    if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        filters = Filters(
            torch.tensor([max(p.top_k, 0) for p in params], device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            torch.tensor([p.min_p for p in params], device=device),
        )
        weights.masked_fill_(weights < thresholds(weights, filters)[:, None], 0.0)
    uniforms = [uniform(row.seed, row.num_output) for row in rows]
    return draw(weights, torch.tensor(uniforms, dtype=torch.float64, device=device))
