"""Attention over cached latents in plain torch: MLA in its absorbed form (DeepSeek-V2, arXiv 2405.04434).

A token's entry is one vector that all heads share; its first elements are the values too. So heads are rows of one
product, and no key or value is stored or read twice.
"""

from dataclasses import dataclass, field

import torch

from .buckets import Bucket, BucketPlans, PageGather
from .interface import AttentionMetadata, KvPages
from .torch_backend import behind_prefix, move_tokens

_MOST_SCORES = 1 << 22
"""Scores that are held at a time: a long chunk's of all heads would take gigabytes."""


@dataclass(slots=True)
class TorchLatentAttention:
    """Pages are [block_size, entry]; there are no pages of values. Metadata must not change in place."""

    name: str = "torch"
    _plans: BucketPlans = field(default_factory=BucketPlans)
    _gather: PageGather = field(default_factory=PageGather)

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``PagedBackend.page_shapes``."""
        return (block_size, num_kv_heads * head_dim), (block_size, 0)

    def append(self, entry_TE: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See ``LatentBackend.append``."""
        cache.view(-1, cache.shape[2])[slot_mapping] = entry_TE.to(cache.dtype)

    def forward(
        self, q_THE: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float, value_size: int
    ) -> torch.Tensor:
        """See ``LatentBackend.forward``."""
        buckets = self._plans.buckets(metadata, cache.shape[1], None, q_THE.dtype)
        if len(buckets) == 1 and buckets[0].rows is None:
            return self._attend(q_THE, cache, buckets[0], scale, value_size)
        out_THV = q_THE.new_empty(*q_THE.shape[:2], value_size)
        for bucket in buckets:
            out_THV[bucket.rows] = self._attend(q_THE[bucket.rows], cache, bucket, scale, value_size)
        return out_THV

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
        self, q_THE: torch.Tensor, cache: torch.Tensor, bucket: Bucket, scale: float, value_size: int
    ) -> torch.Tensor:
        keys_BSE = self._gather(cache, bucket).to(q_THE.dtype)
        q_BQHE = q_THE.unflatten(0, (bucket.size, bucket.num_queries))
        if bucket.shared is not None:
            keys_RE = cache.index_select(0, bucket.shared).flatten(0, 1).to(q_THE.dtype)
            parts = [(keys[:, None], keys[:, None, :, :value_size]) for keys in (keys_RE[None], keys_BSE)]
            prefix = (parts[0][0][0], parts[0][1][0])
            return behind_prefix(q_BQHE, prefix, parts[1], bucket.bias, scale, None).flatten(0, 1)
        num_rows = max(1, _MOST_SCORES // (bucket.size * q_THE.shape[1] * bucket.num_keys))
        out = [
            _attend_rows(q_BQHE[:, first : first + num_rows], keys_BSE, bucket, first, scale, value_size)
            for first in range(0, bucket.num_queries, num_rows)
        ]
        return (out[0] if len(out) == 1 else torch.cat(out, 1)).flatten(0, 1)


def _attend_rows(
    q_BQHE: torch.Tensor, keys_BSE: torch.Tensor, bucket: Bucket, first: int, scale: float, value_size: int
) -> torch.Tensor:
    """The bucket's queries from ``first`` on: [B, Q, H, E] -> [B, Q, H, value_size]."""
    last = first + q_BQHE.shape[1]
    num_keys = bucket.num_keys - bucket.num_queries + last  # none of these queries sees more
    keys_BSE = keys_BSE[:, :num_keys]
    scores = (q_BQHE.flatten(1, 2) @ keys_BSE.transpose(1, 2)).mul_(scale).view(*q_BQHE.shape[:3], num_keys)
    if bucket.is_causal:
        hidden = torch.ones(last - first, num_keys, dtype=torch.bool, device=scores.device).triu_(1 + first)
        scores.masked_fill_(hidden[None, :, None], float("-inf"))
    elif bucket.bias is not None:
        scores += bucket.bias[:, 0, first:last, None, :num_keys]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q_BQHE.dtype)
    return (weights.flatten(1, 2) @ keys_BSE[..., :value_size]).view(*q_BQHE.shape[:3], value_size)
