"""Paged attention in plain torch: the portable reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from .buckets import Bucket, BucketPlans, PageGather
from .float8 import Float8Attention, is_float8, store
from .interface import AttentionMetadata, KvPages
from .quantised import QuantisedAttention
from .quantised_keys import QuantisedKeys


@dataclass(slots=True)
class TorchAttention:
    """Gathers the blocks of similar sequences and attends to them at once.

    What to gather and mask is worked out once per (metadata, window) and kept for the step's other layers, so
    metadata must not change in place.
    """

    name: str = "torch"
    _plans: BucketPlans = field(default_factory=BucketPlans)
    _gather_keys: PageGather = field(default_factory=PageGather)
    _gather_values: PageGather = field(default_factory=PageGather)
    _quantised: QuantisedAttention = field(default_factory=QuantisedAttention)
    _float8: Float8Attention = field(default_factory=Float8Attention)

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``AttentionBackend.page_shapes``."""
        page = (block_size, num_kv_heads, head_dim)
        return page, page

    def append(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        k_cache: KvPages,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend.append``."""
        if is_float8(k_cache):
            store(k_TKD, k_cache, slot_mapping)
            return store(v_TKD, v_cache, slot_mapping)
        if isinstance(k_cache, QuantisedKeys):
            return self._quantised.append(k_TKD, v_TKD, k_cache, v_cache, slot_mapping)
        k_cache.view(-1, *k_cache.shape[2:])[slot_mapping] = k_TKD.to(k_cache.dtype)
        v_cache.view(-1, *v_cache.shape[2:])[slot_mapping] = v_TKD.to(v_cache.dtype)

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
        """See ``AttentionBackend.forward``."""
        if is_float8(k_cache):
            return self._float8.forward(q_THD, k_cache, v_cache, metadata, scale=scale, window=window, softcap=softcap)
        if isinstance(k_cache, QuantisedKeys):
            return self._quantised.forward(
                q_THD, k_cache, v_cache, metadata, scale=scale, window=window, softcap=softcap
            )
        buckets = self._plans.buckets(metadata, k_cache.shape[1], window, q_THD.dtype)
        if len(buckets) == 1 and buckets[0].rows is None:
            return self._attend(q_THD, k_cache, v_cache, buckets[0], scale, softcap)
        out_THD = torch.empty_like(q_THD)
        for bucket in buckets:
            out_THD[bucket.rows] = self._attend(q_THD[bucket.rows], k_cache, v_cache, bucket, scale, softcap)
        return out_THD

    def move(
        self,
        keys: tuple[KvPages, ...],
        values: tuple[torch.Tensor, ...],
        sources: torch.Tensor,
        destinations: torch.Tensor,
    ) -> None:
        """See ``TreeBackend``."""
        move_tokens((*keys, *values), sources, destinations)

    def _attend(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        bucket: Bucket,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = k_cache.shape[2:]
        num_heads = q_THD.shape[1]
        k_BKSD = self._gather_keys(k_cache, bucket).transpose(1, 2).to(q_THD.dtype)
        v_BKSD = self._gather_values(v_cache, bucket).transpose(1, 2).to(q_THD.dtype)
        if bucket.num_queries == 1:
            # The query heads of a KV head become rows of one product: no key is repeated.
            q_BKGD = q_THD.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            if bucket.shared is not None:
                k_KSD, v_KSD = (_pages(cache, bucket.shared).to(q_THD.dtype) for cache in (k_cache, v_cache))
                out = behind_prefix(q_BKGD, (k_KSD, v_KSD), (k_BKSD, v_BKSD), bucket.bias, scale, softcap)
            else:
                out = _scaled_dot_product(q_BKGD, k_BKSD, v_BKSD, bucket, scale, softcap)
            return out.reshape(q_THD.shape)
        q_BHQD = q_THD.reshape(-1, bucket.num_queries, num_heads, head_dim).transpose(1, 2)
        out = _scaled_dot_product(q_BHQD, k_BKSD, v_BKSD, bucket, scale, softcap)
        return out.transpose(1, 2).reshape(q_THD.shape)


def move_tokens(pages: Sequence[KvPages], sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Of pages [num_blocks, block_size, ...]."""
    for cache in pages:
        if isinstance(cache, torch.Tensor) and cache.numel():
            tokens = cache.view(-1, *cache.shape[2:])
            tokens[destinations] = tokens[sources]


def _pages(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[K, S, D] of one run of blocks."""
    return cache.index_select(0, blocks).flatten(0, 1).transpose(0, 1)


def behind_prefix(
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: Bucket, scale: float, softcap: float | None
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
