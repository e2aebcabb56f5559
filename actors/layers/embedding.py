"""The two ends of a decoder, cut by vocabulary over a tensor-parallel group: token embedding and logits."""

import torch
import torch.nn.functional as F

from ...cluster.splits import split_evenly
from ..parallel.collectives import Collectives


class Embedding:
    """Rows of a table [vocab, hidden], times a scale (Gemma's is sqrt(hidden)), in ``dtype``.

    Ranks of a ``group`` have consecutive parts of the table, this one from token ``first`` on.
    """

    def __init__(
        self, table: torch.Tensor, scale: float, dtype: torch.dtype, group: Collectives, first: int = 0
    ) -> None:
        self._table = table
        self._dtype = dtype
        self._group = group
        self._first = first
        # Gemma rounds its scale to the activations' dtype.
        self._scale = torch.tensor(scale, dtype=dtype).item()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""
        if self._group.size == 1:
            return self._rows(token_ids)
        local = token_ids - self._first
        is_elsewhere = (local < 0) | (local >= len(self._table))
        rows = self._rows(local.masked_fill(is_elsewhere, 0)).masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self._group.all_reduce(rows)
        return rows

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(token_ids, self._table).to(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale


class LogitGather:
    """Joins the parts of logits that the ranks of a group have, on the first of them."""

    def __init__(self, vocab_size: int, group: Collectives) -> None:
        self._group = group
        self._widths = [len(part) for part in split_evenly(vocab_size, group.size)]

    def __call__(self, part: torch.Tensor) -> torch.Tensor | None:
        """[R, this rank's tokens] -> [R, vocab] on the first rank, None on the others."""
        if self._group.size == 1:
            return part
        missing = self._widths[0] - part.shape[1]
        parts = self._group.gather(F.pad(part, (0, missing)) if missing else part, 0)
        if parts is None:
            return None
        return torch.cat([rows[:, :width] for rows, width in zip(parts, self._widths, strict=True)], 1)
