"""Eight-bit floats for the native kernels, which read wider ones: blocks of some sequences at a time are decoded.

A row's result then has the same bits whatever else is in the batch, as with every other format there.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from .float8 import MOST_ELEMENTS, decode
from .interface import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a step that follow each other, and the blocks that they see."""

    rows: slice
    """Their queries."""
    blocks: torch.Tensor
    """[N], each once."""
    metadata: AttentionMetadata
    """Over pages of these blocks in that order."""

    def pages(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [N, K, D, block_size] and values [N, K, block_size, D], float32."""
        k_NSKD, v_NSKD = (decode(cache.index_select(0, self.blocks), torch.float32) for cache in (k_cache, v_cache))
        return k_NSKD.permute(0, 2, 3, 1).contiguous(), v_NSKD.transpose(1, 2).contiguous()


@dataclass(slots=True)
class Parts:
    """Works a step out once per (metadata, window): metadata must not change in place."""

    most_elements: int = MOST_ELEMENTS
    """Of keys, and of values, that are floats at a time; a sequence's context is not divided."""
    _made: deque[tuple[AttentionMetadata, int | None, list[Part]]] = field(default_factory=lambda: deque(maxlen=16))

    def of(self, metadata: AttentionMetadata, window: int | None, cache: torch.Tensor) -> list[Part]:
        """Of all sequences, in order."""
        for made, made_for, parts in self._made:
            if made is metadata and made_for == window:
                return parts
        _, block_size, num_kv_heads, entry = cache.shape
        most_blocks = max(1, self.most_elements // (block_size * num_kv_heads * entry))
        parts = _parts(metadata, window, block_size, most_blocks)
        self._made.append((metadata, window, parts))
        return parts


def _parts(metadata: AttentionMetadata, window: int | None, block_size: int, most_blocks: int) -> list[Part]:
    num_keys = metadata.seqused_k.long()
    num_queries = metadata.cu_seqlens_q.diff().long()
    oldest = torch.zeros_like(num_keys) if window is None else (num_keys - num_queries - window + 1).clamp(min=0)
    first, end = oldest // block_size, (num_keys + block_size - 1) // block_size
    columns = torch.arange(metadata.block_table.shape[1])
    is_seen = (columns >= first[:, None]) & (columns < end[:, None])
    table = metadata.block_table.masked_fill(~is_seen, 0)
    parts: list[Part] = []
    start = held = 0
    counts: list[int] = (end - first).tolist()
    for index, count in enumerate(counts):
        if index > start and held + count > most_blocks:
            parts.append(_part(metadata, table, start, index))
            start, held = index, 0
        held += count
    return [*parts, _part(metadata, table, start, len(counts))]


def _part(metadata: AttentionMetadata, table: torch.Tensor, start: int, end: int) -> Part:
    starts = metadata.cu_seqlens_q[start : end + 1]
    rows = slice(int(starts[0]), int(starts[-1]))
    blocks, places = table[start:end].unique(return_inverse=True)
    own = AttentionMetadata(
        starts - starts[0],
        metadata.seqused_k[start:end],
        places.int(),
        metadata.slot_mapping[rows],
        metadata.max_seqlen_q,
        metadata.max_seqlen_k,
        None if metadata.tree_mask is None else metadata.tree_mask[rows],
    )
    return Part(rows, blocks, own)
