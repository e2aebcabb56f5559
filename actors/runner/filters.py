"""Which tokens a draw may choose: top-k, top-p and min-p as one threshold per row.

A filter keeps the tokens that are at least as likely as the last one it must keep. Tokens tied with that one stay too,
so that what is kept depends on the row alone, never on how ties were sorted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .arrays import to_device

_TILE = 64
"""Tokens whose maximum stands for them in the search for the largest."""
_FIRST_TRY = 1024
"""Likeliest tokens among which the end of a top-p nucleus is looked for before all are summed."""


@dataclass(frozen=True, slots=True)
class Filters:
    """One of each per row, known to the host, so that the device need not be asked; 0, 1 and 0 switch them off."""

    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]

    def of(self, rows: Sequence[int]) -> "Filters":
        """Of some rows."""
        return Filters(
            [self.top_k[row] for row in rows], [self.top_p[row] for row in rows], [self.min_p[row] for row in rows]
        )


def thresholds(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Least weight [R] that may be drawn; weights [R, vocab] are exp(logit - largest logit), so each row's best is 1.

    In vLLM's order: min-p, top-k, top-p of what they leave.
    """
    device = weights.device
    least = to_device(filters.min_p, torch.float32, device)
    limited = [row for row, top_k in enumerate(filters.top_k) if top_k > 0]
    nucleus = [row for row, top_k in enumerate(filters.top_k) if top_k <= 0 and filters.top_p[row] < 1.0]
    for rows, search in ((limited, _top_k_top_p), (nucleus, _top_p)):
        if len(rows) == len(weights):
            return search(weights, filters)
        if rows:
            index = to_device(rows, torch.int64, device)
            least[index] = search(weights[index], filters.of(rows))
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
    device, most = weights.device, max(filters.top_k)
    values = largest(weights, most)
    if min(filters.top_k) < most:
        order = torch.arange(values.shape[1], device=device)
        values = values.masked_fill(order >= to_device(filters.top_k, torch.int64, device)[:, None], 0.0)
    if max(filters.min_p) > 0.0:
        values = values.masked_fill(values < to_device(filters.min_p, torch.float32, device)[:, None], 0.0)
    sums = values.cumsum(1, dtype=torch.float64)
    return _last_kept(values, sums, sums[:, -1], to_device(filters.top_p, torch.float64, device))


def _top_p(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    device, vocab = weights.device, weights.shape[1]
    top_p = to_device(filters.top_p, torch.float64, device)
    weights = weights.masked_fill(weights < to_device(filters.min_p, torch.float32, device)[:, None], 0.0)
    totals = weights.sum(1, dtype=torch.float64)
    # Whether a first try was enough only the device would know, and asking it costs more than sorting there.
    values = largest(weights, _FIRST_TRY if device.type == "cpu" else vocab)
    sums = values.cumsum(1, dtype=torch.float64)
    least = _last_kept(values, sums, totals, top_p)
    if values.shape[1] < vocab:
        wide = (sums[:, -1] < top_p * totals).nonzero().flatten()
        if len(wide):
            values = largest(weights[wide], vocab)
            least[wide] = _last_kept(values, values.cumsum(1, dtype=torch.float64), totals[wide], top_p[wide])
    return least


def _last_kept(values: torch.Tensor, sums: torch.Tensor, totals: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest of the shortest prefix of descending ``values`` whose sum reaches top_p of the total."""
    wanted = (top_p * totals)[:, None]
    # Of top_p = 1 everything is kept that weighs anything, whatever the sums round to.
    kept = ((sums - values < wanted) | (top_p[:, None] >= 1.0)) & (values > 0)
    last = kept.sum(1, keepdim=True).sub_(1).clamp_(min=0)
    return values.gather(1, last).flatten()
