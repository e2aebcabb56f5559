"""Which pages to gather for which queries: the plan of attention in plain torch, kept for a step's layers."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from .interface import AttentionMetadata

_MIN_BUCKET_BLOCKS = 16
_MIN_SHARED_BLOCKS = 16
"""A shorter common prefix is not worth a call of its own."""


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence of a step, and which of its blocks its queries see."""

    index: int
    start: int
    num_queries: int
    num_keys: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences with equally many queries and keys of similar length, attended to by one call."""

    size: int
    """B"""
    rows: torch.Tensor | None
    """[B * num_queries] rows of the packed queries; None: all of them, in order."""
    num_queries: int
    blocks: torch.Tensor
    """[B * num_blocks] blocks to gather."""
    num_keys: int
    """Gathered keys to use, counted from the first block."""
    bias: torch.Tensor | None
    """[B, 1, num_queries, num_keys], 0 or -inf; None: no key is hidden but by ``is_causal``."""
    is_causal: bool
    first_block: torch.Tensor
    """[B]: which of its sequence's blocks is the first of ``blocks``."""
    query_at: torch.Tensor
    """[B, num_queries] positions."""
    shared: torch.Tensor | None = None
    """Blocks that come before ``blocks`` in every sequence, read once for all of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    metadata: AttentionMetadata
    window: int | None
    buckets: list[Bucket]


@dataclass(slots=True)
class BucketPlans:
    """Works a step out once per (metadata, window): metadata must not change in place."""

    _plans: deque[_Plan] = field(default_factory=lambda: deque(maxlen=16))
    """The last plans: at least one per KV group."""

    def buckets(
        self, metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype
    ) -> list[Bucket]:
        """Of all sequences with queries. ``dtype`` is that of the bias."""
        for plan in self._plans:
            if plan.metadata is metadata and plan.window == window:
                return plan.buckets
        buckets = make_buckets(metadata, block_size, window, dtype)
        self._plans.append(_Plan(metadata, window, buckets))
        return buckets


@dataclass(slots=True)
class PageGather:
    """Gathered pages go where the last layer's went: fresh megabytes cost more than the attention itself."""

    _scratch: torch.Tensor | None = None

    def __call__(self, cache: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """[B, S, ...] view of the bucket's pages [block_size, ...], valid until the next call."""
        size = len(bucket.blocks) * cache[0].numel()
        scratch = self._scratch
        if scratch is None or scratch.numel() < size or scratch.dtype != cache.dtype:
            scratch = self._scratch = torch.empty(size + size // 2, dtype=cache.dtype, device=cache.device)
        pages = scratch[:size].view(-1, *cache.shape[1:])  # [B * num_blocks, block_size, ...]
        torch.index_select(cache, 0, bucket.blocks, out=pages)
        return pages.view(bucket.size, -1, *cache.shape[2:])[:, : bucket.num_keys]


def make_buckets(metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype) -> list[Bucket]:
    # Sequences are padded to the longest of their bucket, so a bucket spans at most a factor of two.
    buckets: defaultdict[tuple[int, int], list[_Span]] = defaultdict(list)
    families: defaultdict[int, list[_Span]] = defaultdict(list)
    first_blocks = metadata.block_table[:, 0].tolist()
    for span in _spans(metadata, block_size, window):
        if window is None and span.num_queries == 1 and span.num_blocks > _MIN_SHARED_BLOCKS:
            families[first_blocks[span.index]].append(span)
        else:
            buckets[_bucket_key(span)].append(span)
    sharing: list[tuple[list[_Span], torch.Tensor]] = []
    for family in families.values():
        prefix = _common_prefix(family, metadata.block_table, block_size)
        if prefix is not None:
            sharing.append((family, prefix))
            continue
        for span in family:
            buckets[_bucket_key(span)].append(span)
    whole = len(buckets) + len(sharing) == 1
    made = [_bucket(spans, metadata, block_size, window, dtype, whole) for spans in buckets.values()]
    for family, prefix in sharing:
        size = len(prefix)
        rests = [replace(span, first_block=size, num_blocks=span.num_blocks - size) for span in family]
        made.append(replace(_bucket(rests, metadata, block_size, window, dtype, whole), shared=prefix))
    return made


def _bucket_key(span: _Span) -> tuple[int, int]:
    return span.num_queries, (max(span.num_blocks, _MIN_BUCKET_BLOCKS) - 1).bit_length()


def _common_prefix(family: Sequence[_Span], table: torch.Tensor, block_size: int) -> torch.Tensor | None:
    """Leading blocks that all have in common, each keeping a key of its own; None if they are too few."""
    if len(family) < 2:
        return None
    limit = min((span.num_keys - 1) // block_size for span in family)
    rows = table[[span.index for span in family], :limit]
    size = int((rows == rows[0]).all(0).int().cumprod(0).sum())
    return rows[0, :size] if size >= _MIN_SHARED_BLOCKS else None


def _spans(metadata: AttentionMetadata, block_size: int, window: int | None) -> list[_Span]:
    starts: list[int] = metadata.cu_seqlens_q.tolist()
    spans: list[_Span] = []
    for index, num_keys in enumerate(metadata.seqused_k.tolist()):
        num_queries = starts[index + 1] - starts[index]
        oldest = 0 if window is None else max(0, num_keys - num_queries - window + 1)
        first = oldest // block_size
        blocks = -(-num_keys // block_size) - first
        if num_queries:
            spans.append(_Span(index, starts[index], num_queries, num_keys, first, blocks))
    return spans


def _bucket(
    spans: Sequence[_Span],
    metadata: AttentionMetadata,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    whole: bool,
) -> Bucket:
    device = metadata.block_table.device
    num_queries = spans[0].num_queries
    num_blocks = max(span.num_blocks for span in spans)
    first, keys, index, start = torch.tensor(
        [(span.first_block, span.num_keys, span.index, span.start) for span in spans], device=device
    ).unbind(1)

    columns = first[:, None] + torch.arange(num_blocks, device=device)  # [B, num_blocks]
    table = metadata.block_table[index]
    blocks = table.gather(1, columns.clamp(max=table.shape[1] - 1))

    num_keys = max(span.num_keys - span.first_block * block_size for span in spans)
    key_at = first[:, None] * block_size + torch.arange(num_keys, device=device)  # [B, num_keys]
    query_at = (keys - num_queries)[:, None] + torch.arange(num_queries, device=device)  # [B, num_queries]
    at = start[:, None] + torch.arange(num_queries, device=device)  # [B, num_queries]
    rows = None if whole else at.flatten()
    is_causal = num_queries > 1 and all(span.num_keys == num_queries for span in spans)
    if metadata.tree_mask is not None and num_queries > 1:
        seen, is_causal = _seen_in_trees(metadata.tree_mask[at], query_at, key_at, window), False
    else:
        seen = _seen(key_at[:, None], query_at[:, :, None], window)
    if window is not None:
        is_causal = is_causal and num_queries <= window
    if is_causal or bool(seen.all()):
        return Bucket(len(spans), rows, num_queries, blocks.flatten(), num_keys, None, is_causal, first, query_at)
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return Bucket(len(spans), rows, num_queries, blocks.flatten(), num_keys, bias[:, None], False, first, query_at)


def _seen(key_at: torch.Tensor, query_at: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = key_at <= query_at
    return seen if window is None else seen & (key_at > query_at - window)


def _seen_in_trees(
    mask_BQ: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[B, Q, S]: which of the keys that lie at [B, S] are seen by queries that lie at [B, Q]."""
    bits = torch.arange(64, device=mask_BQ.device)
    is_node = mask_BQ != 0
    depth = (mask_BQ[..., None] >> bits & 1).sum(-1) - 1
    stands_at = torch.where(is_node, query_at[:, :1] + depth, query_at)
    behind = key_at - query_at[:, :1]  # [B, S]: behind the sequence's first query
    among = behind.clamp(0, query_at.shape[1] - 1)
    key_stands_at = torch.where(behind < 0, key_at, stands_at.gather(1, among))
    seen = _seen(key_stands_at[:, None], stands_at[..., None], window)
    is_kin = (behind[:, None] < 0) | (mask_BQ[..., None] >> among[:, None] & 1).bool()
    return seen & torch.where(is_node[..., None], is_kin, True) & (key_at <= query_at[:, -1:])[:, None]
