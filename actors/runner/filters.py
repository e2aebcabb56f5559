"""Which tokens a draw may choose: top-k, top-p and min-p as one threshold per row.

A filter keeps the tokens that are at least as likely as the last one it must keep. Tokens tied with that one stay too,
so that what is kept depends on the row alone, never on how ties were sorted.
"""

from dataclasses import dataclass

import numpy as np
import torch

_TILE = 64
"""Tokens whose maximum stands for them in the search for the largest."""
_FIRST_TRY = 1024
"""Likeliest tokens among which the end of a top-p nucleus is looked for before all are summed."""


@dataclass(frozen=True, slots=True)
class Filters:
    """[R] each, on the device of the weights; 0, 1 and 0 switch them off."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def thresholds(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Least weight [R] that may be drawn; weights [R, vocab] are exp(logit - largest logit), so each row's best is 1.

    In vLLM's order: min-p, top-k, top-p of what they leave.
    """
    least = filters.min_p.clone()
    limited = filters.top_k > 0
    nucleus = (filters.top_p < 1.0) & ~limited
    for chosen, search in ((limited, _top_k_top_p), (nucleus, _top_p)):
        rows = chosen.nonzero().flatten()
        if len(rows):
            picked = Filters(filters.top_k[rows], filters.top_p[rows], filters.min_p[rows])
            least[rows] = search(weights if len(rows) == len(weights) else weights[rows], picked)
    return least


def largest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest of each row [R, vocab], in descending order."""
    vocab = weights.shape[1]
    count = min(count, vocab)
    if count * _TILE * 4 <= vocab and vocab % _TILE == 0:
        # The best ``count`` tokens lie in the ``count`` tiles with the best maxima.
        tiles = weights.view(len(weights), -1, _TILE)
        best = tiles.amax(-1).topk(count, sorted=False).indices
        weights = tiles.gather(1, best[..., None].expand(-1, -1, _TILE)).flatten(1)
    elif weights.device.type == "cpu":  # numpy's vectorised sort is several times as fast as torch's top-k
        return torch.from_numpy(np.sort(weights.numpy(), 1)[:, : -count - 1 : -1].copy())
    return weights.topk(count).values


def _top_k_top_p(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    values = largest(weights, int(filters.top_k.max()))
    order = torch.arange(values.shape[1], device=values.device)
    values = values.masked_fill(order >= filters.top_k[:, None], 0.0)
    values = values.masked_fill(values < filters.min_p[:, None], 0.0)
    sums = values.cumsum(1, dtype=torch.float64)
    return _last_kept(values, sums, sums[:, -1], filters.top_p)


def _top_p(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    weights = weights.masked_fill(weights < filters.min_p[:, None], 0.0)
    totals = weights.sum(1, dtype=torch.float64)
    values = largest(weights, _FIRST_TRY)
    sums = values.cumsum(1, dtype=torch.float64)
    least = _last_kept(values, sums, totals, filters.top_p)
    wide = (sums[:, -1] < filters.top_p * totals).nonzero().flatten()
    if len(wide):
        values = largest(weights[wide], weights.shape[1])
        least[wide] = _last_kept(values, values.cumsum(1, dtype=torch.float64), totals[wide], filters.top_p[wide])
    return least


def _last_kept(values: torch.Tensor, sums: torch.Tensor, totals: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest of the shortest prefix of descending ``values`` whose sum reaches top_p of the total."""
    wanted = (top_p * totals)[:, None]
    # Of top_p = 1 everything is kept that weighs anything, whatever the sums round to.
    kept = ((sums - values < wanted) | (top_p[:, None] >= 1.0)) & (values > 0)
    last = kept.sum(1, keepdim=True).sub_(1).clamp_(min=0)
    return values.gather(1, last).flatten()
