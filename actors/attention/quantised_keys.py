"""A layer's quantised keys: pages, how they are encoded, and what stands in 16 bits beside them."""

from dataclasses import dataclass

import torch

from .kv_codec import PageCodec
from .open_keys import OpenKeys


@dataclass(frozen=True, slots=True)
class QuantisedKeys:
    """One slot's pages of keys; those of values are plain bytes [num_blocks, num_kv_heads, page bytes]."""

    pages: torch.Tensor
    """[num_blocks, num_kv_heads, page bytes]"""
    codec: PageCodec
    open: OpenKeys
    slot: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of what the pages hold: (num_blocks, num_kv_heads, head_dim, block_size)."""
        num_blocks, num_kv_heads, _ = self.pages.shape
        return num_blocks, num_kv_heads, self.codec.head_dim, self.codec.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the pages; open ones are not among them."""
        return self.pages.nbytes

    @property
    def open_pages(self) -> torch.Tensor:
        """[open pages, num_kv_heads, head_dim, block_size] float16."""
        return self.open.pages[self.slot]

    def reopen(self, block: int, count: int) -> None:
        """Fill the block's open page with the ``count`` tokens of its quantised one."""
        page = self.open.open(block)
        self.open_pages[page, ..., :count] = self.codec.decode_keys(self.pages[block])[..., :count].half()
