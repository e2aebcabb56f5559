"""Log-probabilities of the model's own distribution, before anything a request asks for changes it."""

from collections.abc import Sequence

import torch

from ...cluster.messages import TokenLogprob


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    """Of the given tokens [N] under logits [N, vocab], with as many alternatives as each row asks for."""
    norms = logits.logsumexp(1)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(1).add_(1)
    values = (chosen.flatten() - norms).tolist()
    tops = _tops(logits, norms, num_top)
    return [
        TokenLogprob(token_id, value, rank, top)
        for token_id, value, rank, top in zip(token_ids.tolist(), values, ranks.tolist(), tops, strict=True)
    ]


def _tops(logits: torch.Tensor, norms: torch.Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(num_top), logits.shape[1])
    if not most:
        return [()] * len(num_top)
    best = logits.topk(most, dim=1)
    ids: list[list[int]] = best.indices.tolist()
    values: list[list[float]] = (best.values - norms[:, None]).tolist()
    return [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids, values, num_top, strict=True)
    ]
