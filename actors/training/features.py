"""What the model makes of texts: the states that heads read, and the distributions that drafts should have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...cluster.kv_layout import KvLayout
from ..attention.interface import AttentionMetadata
from ..attention.kv_memory import KvMemory
from ..models.decoder import Decoder
from .corpus import Text

TOP = 16
"""Likeliest tokens whose probabilities are kept."""
_BLOCK_SIZE = 16
_LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Features:
    """One row for each place of the texts behind which something was written, text after text."""

    hidden: torch.Tensor
    """[N, hidden] float16, after the final norm."""
    top_ids: torch.Tensor
    """[N, TOP] int32: the likeliest next tokens, best first."""
    top_probs: torch.Tensor
    """[N, TOP] float16, at temperature 1."""
    left: torch.Tensor
    """[N] int64: rows of the same text that follow."""
    firsts: torch.Tensor
    """[texts] int64: the first row of each text."""

    @classmethod
    def of(cls, decoder: Decoder, texts: Sequence[Text], on_done: Callable[[int], None]) -> "Features":
        """Computed by the model; ``on_done`` is told how many texts are done."""
        reader = _Reader(decoder, max(len(text.token_ids) for text in texts))
        read: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for index, text in enumerate(texts, 1):
            read.append(reader.read(text))
            on_done(index)
        counts = torch.tensor([len(hidden) for hidden, _, _ in read])
        return cls(
            *(torch.cat(parts) for parts in zip(*read, strict=True)),
            left=torch.cat([torch.arange(count - 1, -1, -1) for count in counts.tolist()]),
            firsts=counts.cumsum(0) - counts,
        )

    @classmethod
    def load(cls, path: Path) -> "Features":
        """Inverse of ``save``."""
        return cls(**load_file(path))

    def save(self, path: Path) -> None:
        """Keep them for a run that goes on."""
        save_file({field.name: getattr(self, field.name) for field in fields(self)}, path)

    def rows(self, text: int) -> slice:
        """Of one text."""
        first = int(self.firsts[text])
        return slice(first, first + int(self.left[first]) + 1)


class _Reader:
    """Runs the model over one text at a time, each in the same pages."""

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._layout = layout = KvLayout.of(spec.layer_windows, _BLOCK_SIZE)
        width = -(-max_tokens // _BLOCK_SIZE)
        num_blocks = 1 + width * len(layout.groups)
        self._tables = torch.arange(1, num_blocks, dtype=torch.int32).view(len(layout.groups), 1, width)
        self._kv = KvMemory.allocate(
            layout, num_blocks, spec.cache_heads, spec.cache_dim, decoder.dtype, decoder.device, decoder.backend
        )

    def read(self, text: Text) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, ids and probabilities of its rows."""
        length = len(text.token_ids)
        positions = torch.arange(length)
        hidden = self._decoder.forward(
            torch.tensor(text.token_ids), positions, self._kv, tuple(self._metadata(positions, t) for t in self._tables)
        )[max(0, text.start - 1) :]
        tops = [self._top(hidden[row : row + _LOGIT_ROWS]) for row in range(0, len(hidden), _LOGIT_ROWS)]
        ids, probs = (torch.cat(parts) for parts in zip(*tops, strict=True))
        return hidden.half(), ids, probs

    def _metadata(self, positions: torch.Tensor, table: torch.Tensor) -> AttentionMetadata:
        length = len(positions)
        slots = table[0].long()[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        lengths = torch.tensor([length], dtype=torch.int32)
        return AttentionMetadata(torch.tensor([0, length], dtype=torch.int32), lengths, table, slots, length, length)

    def _top(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._decoder.logits(hidden)
        assert logits is not None
        probs, ids = logits.softmax(1).topk(TOP)
        return ids.int(), probs.half()
