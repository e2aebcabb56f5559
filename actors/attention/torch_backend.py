"""Paged attention in plain torch: the portable reference."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

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
class _Bucket:
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
    shared: torch.Tensor | None = None
    """Blocks that come before ``blocks`` in every sequence, read once for all of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    metadata: AttentionMetadata
    window: int | None
    buckets: list[_Bucket]


@dataclass(slots=True)
class TorchAttention:
    """Gathers the blocks of similar sequences and attends to them at once.

    What to gather and mask is worked out once per (metadata, window) and kept for the step's other layers, so
    metadata must not change in place.
    """

    name: str = "torch"
    _plans: deque[_Plan] = field(default_factory=lambda: deque(maxlen=16))
    """The last plans: at least one per KV group."""
    _scratch: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gathered pages go where the last layer's went: fresh megabytes cost more than the attention itself."""

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``AttentionBackend.page_shapes``."""
        page = (block_size, num_kv_heads, head_dim)
        return page, page

    def append(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend.append``."""
        k_cache.view(-1, *k_cache.shape[2:])[slot_mapping] = k_TKD.to(k_cache.dtype)
        v_cache.view(-1, *v_cache.shape[2:])[slot_mapping] = v_TKD.to(v_cache.dtype)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        buckets = self._buckets(metadata, k_cache.shape[1], window, q_THD.dtype)
        if len(buckets) == 1 and buckets[0].rows is None:
            return self._attend(q_THD, k_cache, v_cache, buckets[0], scale, softcap)
        out_THD = torch.empty_like(q_THD)
        for bucket in buckets:
            out_THD[bucket.rows] = self._attend(q_THD[bucket.rows], k_cache, v_cache, bucket, scale, softcap)
        return out_THD

    def _buckets(
        self, metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype
    ) -> list[_Bucket]:
        for plan in self._plans:
            if plan.metadata is metadata and plan.window == window:
                return plan.buckets
        buckets = _buckets(metadata, block_size, window, dtype)
        self._plans.append(_Plan(metadata, window, buckets))
        return buckets

    def _attend(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        bucket: _Bucket,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = k_cache.shape[2:]
        num_heads = q_THD.shape[1]
        k_BKSD = self._gather("k", k_cache, bucket).to(q_THD.dtype)
        v_BKSD = self._gather("v", v_cache, bucket).to(q_THD.dtype)
        if bucket.num_queries == 1:
            # The query heads of a KV head become rows of one product: no key is repeated.
            q_BKGD = q_THD.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            if bucket.shared is not None:
                k_KSD, v_KSD = (_pages(cache, bucket.shared).to(q_THD.dtype) for cache in (k_cache, v_cache))
                out = _behind_prefix(q_BKGD, (k_KSD, v_KSD), (k_BKSD, v_BKSD), bucket.bias, scale, softcap)
            else:
                out = _scaled_dot_product(q_BKGD, k_BKSD, v_BKSD, bucket, scale, softcap)
            return out.reshape(q_THD.shape)
        q_BHQD = q_THD.reshape(-1, bucket.num_queries, num_heads, head_dim).transpose(1, 2)
        out = _scaled_dot_product(q_BHQD, k_BKSD, v_BKSD, bucket, scale, softcap)
        return out.transpose(1, 2).reshape(q_THD.shape)

    def _gather(self, name: str, cache: torch.Tensor, bucket: _Bucket) -> torch.Tensor:
        """[B, K, S, D] view of the bucket's pages, valid until the next gather of that name."""
        size = len(bucket.blocks) * cache[0].numel()
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < size or scratch.dtype != cache.dtype:
            scratch = self._scratch[name] = torch.empty(size + size // 2, dtype=cache.dtype, device=cache.device)
        pages = scratch[:size].view(-1, *cache.shape[1:])  # [B * num_blocks, block_size, K, D]
        torch.index_select(cache, 0, bucket.blocks, out=pages)
        return pages.view(bucket.size, -1, *cache.shape[2:])[:, : bucket.num_keys].transpose(1, 2)


def _buckets(metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype) -> list[_Bucket]:
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
) -> _Bucket:
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
    seen = key_at[:, None] <= query_at[:, :, None]
    rows = None if whole else (start[:, None] + torch.arange(num_queries, device=device)).flatten()

    is_causal = num_queries > 1 and all(span.num_keys == num_queries for span in spans)
    if window is not None:
        seen &= key_at[:, None] > query_at[:, :, None] - window
        is_causal = is_causal and num_queries <= window
    if is_causal or bool(seen.all()):
        return _Bucket(len(spans), rows, num_queries, blocks.flatten(), num_keys, None, is_causal)
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return _Bucket(len(spans), rows, num_queries, blocks.flatten(), num_keys, bias[:, None], False)


def _pages(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[K, S, D] of one run of blocks."""
    return cache.index_select(0, blocks).flatten(0, 1).transpose(0, 1)


def _behind_prefix(
    q_BKGD: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor],
    rest: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of single queries over a prefix [K, S, D] that all share and keys [B, K, R, D] of their own.

    The shared part is one product for the whole batch, so its keys and values are read once, not once per sequence.
    """
    (k_KSD, v_KSD), (k_BKRD, v_BKRD) = prefix, rest
    shape = q_BKGD.shape
    q_KRowsD = q_BKGD.transpose(0, 1).flatten(1, 2)
    shared = (q_KRowsD @ k_KSD.transpose(-1, -2)).unflatten(1, (shape[0], shape[2])).transpose(0, 1)
    own = q_BKGD @ k_BKRD.transpose(-1, -2)
    scores = torch.cat((shared, own), -1).mul_(scale)  # [B, K, G, S + R]
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    num_shared = k_KSD.shape[1]
    if bias is not None:
        scores[..., num_shared:] += bias
    weights = torch.softmax(scores, -1)
    ahead = weights[..., :num_shared].transpose(0, 1).flatten(1, 2) @ v_KSD  # [K, B * G, D]
    return weights[..., num_shared:] @ v_BKRD + ahead.unflatten(1, (shape[0], shape[2])).transpose(0, 1)


def _scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: _Bucket, scale: float, softcap: float | None
) -> torch.Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, bucket.bias, is_causal=bucket.is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, K, groups * Q, D]
    scores = torch.tanh_((q @ k.transpose(-1, -2)).mul_(scale / softcap)).mul_(softcap)
    scores = scores.unflatten(2, (groups, -1))
    if bucket.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    elif bucket.bias is not None:
        scores += bucket.bias[:, None]
    out = torch.softmax(scores, -1).flatten(2, 3) @ v
    return out.unflatten(2, (groups, -1)).flatten(1, 2)
