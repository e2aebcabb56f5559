"""The tensors behind the block pool."""

from dataclasses import dataclass
from math import prod
from mmap import mmap

import torch

from ...cluster.ids import BlockId
from ...cluster.kv_layout import KvLayout
from .interface import PagedBackend


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Per page slot a key and a value tensor [num_blocks, *page], with pages as the attention backend wants them.

    Values that are part of the keys have pages of no elements.
    """

    layout: KvLayout
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls,
        layout: KvLayout,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: PagedBackend,
    ) -> "KvMemory":
        """Zeroed pages; page 0 is the null page and stays zero."""
        key_page, value_page = backend.page_shapes(layout.block_size, num_kv_heads, head_dim)

        def pages(page: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(_zeros((num_blocks, *page), dtype, device) for _ in range(layout.slots))

        return cls(layout, pages(key_page), pages(value_page))

    def copy_blocks(self, copies: tuple[tuple[BlockId, BlockId], ...]) -> None:
        """Copy whole pages, (source, destination)."""
        if not copies:
            return
        source = torch.tensor([pair[0] for pair in copies], device=self.keys[0].device)
        destination = torch.tensor([pair[1] for pair in copies], device=self.keys[0].device)
        for pages in (*self.keys, *self.values):
            pages[destination] = pages[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory is mapped and not written: the machine gives it, zeroed, when a page is first used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
