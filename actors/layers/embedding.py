"""Token embedding."""

import torch
import torch.nn.functional as F


class Embedding:
    """Rows of a table [vocab, hidden], times a scale (Gemma's is sqrt(hidden)), in ``dtype``."""

    def __init__(self, table: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
        self._table = table
        self._dtype = dtype
        # Gemma rounds its scale to the activations' dtype.
        self._scale = torch.tensor(scale, dtype=dtype).item()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""
        rows = F.embedding(token_ids, self._table).to(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale
