"""The tensors behind the block pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import TypeAlias

import numpy as np
import torch

from ...cluster.ids import BlockId
from ...cluster.kv_formats import KvFormat
from ...cluster.kv_layout import KvLayout
from .float8 import page_shape
from .interface import AttentionMetadata, KvPages, PagedBackend
from .kv_codec import PageCodec
from .open_keys import OpenKeys
from .quantised_keys import QuantisedKeys

KvType: TypeAlias = torch.dtype | KvFormat
"""How keys and values are kept: as floats, or in a quantised format."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Per page slot keys and values, [num_blocks, *page], with pages as the attention backend wants them.

    Values that are part of the keys have pages of no elements.
    """

    layout: KvLayout
    keys: tuple[KvPages, ...]
    values: tuple[torch.Tensor, ...]
    open: OpenKeys | None = None
    """Of formats that quantise blocks as a whole."""

    @classmethod
    def allocate(
        cls,
        layout: KvLayout,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KvType,
        device: torch.device,
        backend: PagedBackend,
    ) -> "KvMemory":
        """Zeroed pages; page 0 is the null page and stays zero."""
        if isinstance(dtype, KvFormat) and dtype.quantises_blocks:
            codec = PageCodec(dtype, head_dim, layout.block_size)
            return cls._quantised(layout, num_blocks, num_kv_heads, codec, device)
        if isinstance(dtype, KvFormat):
            key_page = value_page = page_shape(layout.block_size, num_kv_heads, head_dim)
            kept_as = torch.uint8
        else:
            key_page, value_page = backend.page_shapes(layout.block_size, num_kv_heads, head_dim)
            kept_as = dtype

        def pages(page: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(_zeros((num_blocks, *page), kept_as, device) for _ in range(layout.slots))

        return cls(layout, pages(key_page), pages(value_page))

    @classmethod
    def _quantised(
        cls, layout: KvLayout, num_blocks: int, num_kv_heads: int, codec: PageCodec, device: torch.device
    ) -> "KvMemory":
        """The same pages for every backend."""
        opened = OpenKeys(num_blocks, (num_kv_heads, codec.head_dim, codec.block_size), layout.slots, device)

        def pages(size: int) -> torch.Tensor:
            return _zeros((num_blocks, num_kv_heads, size), torch.uint8, device)

        keys = tuple(QuantisedKeys(pages(codec.key_bytes), codec, opened, slot) for slot in range(layout.slots))
        return cls(layout, keys, tuple(pages(codec.value_bytes) for _ in keys), opened)

    def prepare(self, metadata: tuple[AttentionMetadata, ...]) -> None:
        """Before a step's layers: the blocks that it writes are opened."""
        if self.open is None:
            return
        slots = np.concatenate([group.slot_mapping.cpu().numpy() for group in metadata])
        sizes = np.tile(np.diff(metadata[0].cu_seqlens_q.cpu().numpy()).astype(np.int64), len(metadata))
        for block, count in self.open.prepare(slots, sizes.cumsum()).items():
            self._reopen(block, count)

    @contextmanager
    def same_step(self) -> Iterator[None]:
        """Passes in here go on with the step before: what it has opened stays open."""
        if self.open is None:
            yield
            return
        self.open.holds = True
        try:
            yield
        finally:
            self.open.holds = False

    def copy_blocks(self, copies: tuple[tuple[BlockId, BlockId], ...]) -> None:
        """Copy whole pages, (source, destination)."""
        if not copies:
            return
        source = torch.tensor([pair[0] for pair in copies], device=self.values[0].device)
        destination = torch.tensor([pair[1] for pair in copies], device=self.values[0].device)
        for keys in (*self.keys, *self.values):
            pages = keys.pages if isinstance(keys, QuantisedKeys) else keys
            pages[destination] = pages[source]
        if self.open is not None:
            for pair in copies:
                self.open.close(pair[1])  # of the block's former owner

    def _reopen(self, block: int, count: int) -> None:
        for keys in self.keys:
            if isinstance(keys, QuantisedKeys):
                keys.reopen(block, count)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory is mapped and not written: the machine gives it, zeroed, when a page is first used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
