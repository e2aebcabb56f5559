"""The attention contract, flash-attention's: varlen queries over a paged KV cache."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from .quantised_keys import QuantisedKeys

KvPages: TypeAlias = torch.Tensor | QuantisedKeys
"""A layer's keys, as the backend that reads them wants them; its values are a tensor in every format."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch as a KV group sees it: B sequences with T query tokens in all.

    Query i of a sequence with q queries and k keys stands at position ``k - q + i`` (bottom-right causal mask), but for
    nodes of a tree.
    """

    cu_seqlens_q: torch.Tensor
    """[B + 1] int32: where each sequence's queries start in the packed batch."""
    seqused_k: torch.Tensor
    """[B] int32: keys per sequence, this step's tokens included."""
    block_table: torch.Tensor
    """[B, max_blocks] int32: block of every ``block_size`` keys; 0 where there is none."""
    slot_mapping: torch.Tensor
    """[T] int64: ``block * block_size + offset`` at which each query token's own key and value are stored."""
    max_seqlen_q: int
    max_seqlen_k: int
    tree_mask: torch.Tensor | None = None
    """[T] int64, for a ``TreeBackend``: where it is not 0, the query is a node of a tree. It sees the keys before its
    sequence's queries, and of these the n-th where bit n is set, itself included; it stands as many places behind the
    first of them as it has ancestors. At most 64 queries a sequence."""


class PagedBackend(Protocol):
    """What every backend says of its cache: k_cache and v_cache are [num_blocks, *page]."""

    name: str

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of a page of keys and of a page of values.

        Both have the same number of elements, or the values none: where they are part of the keys.
        """
        ...


@runtime_checkable
class TreeBackend(PagedBackend, Protocol):
    """A backend that takes ``tree_mask``, and can move tokens to where those of a sequence stand."""

    def move(
        self,
        keys: tuple[KvPages, ...],
        values: tuple[torch.Tensor, ...],
        sources: torch.Tensor,
        destinations: torch.Tensor,
    ) -> None:
        """Copy tokens from slots [N] int64 to slots [N], in all of the pages. No format of theirs quantises blocks."""
        ...


class LatentBackend(PagedBackend, Protocol):
    """Of heads that share one cached vector a token (MLA in its absorbed form); its first elements are the values."""

    def append(self, entry_TE: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store entries of T tokens in pages [num_blocks, block_size, E], in place."""
        ...

    def forward(
        self, q_THE: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float, value_size: int
    ) -> torch.Tensor:
        """Causal attention of q [T, num_heads, E] over the cached entries -> [T, num_heads, value_size]."""
        ...


class AttentionBackend(PagedBackend, Protocol):
    """Of heads with keys and values of their own."""

    def append(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        k_cache: KvPages,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store keys and values of T tokens, [T, num_kv_heads, head_dim], in place."""
        ...

    def forward(
        self,
        q_THD: torch.Tensor,
        k_cache: KvPages,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, num_heads, head_dim] over the cached keys; the result has q's shape.

        ``window`` counts the keys a query sees, itself included; ``softcap`` c maps scores s to c·tanh(s/c).
        """
        ...
