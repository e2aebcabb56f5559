"""Attention over quantised pages in plain torch: the portable reference.

A query sees the keys of its own block as they were computed, in 16 bits, and those of the blocks before it quantised.
That is so in whatever steps the tokens came: one by one, in chunks, verified after drafting, or behind cached blocks.
"""

from dataclasses import dataclass, field

import torch

from .buckets import Bucket, BucketPlans
from .interface import AttentionMetadata
from .quantised_keys import QuantisedKeys

_MOST_SCORES = 1 << 22
"""Scores that are held at a time: a long chunk's of all heads would take gigabytes."""


@dataclass(slots=True)
class QuantisedAttention:
    """Part of the torch and flash backends; metadata must not change in place."""

    _plans: BucketPlans = field(default_factory=BucketPlans)

    def append(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        keys: QuantisedKeys,
        values: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend.append``; every block of the slots is open."""
        size = keys.codec.block_size
        blocks, offsets = slot_mapping // size, slot_mapping % size
        keys.open_pages[keys.open.table[blocks].long(), :, :, offsets] = k_TKD.half()
        written, inverse = blocks.unique(return_inverse=True)
        counts = torch.zeros_like(written).scatter_reduce_(0, inverse, offsets + 1, "amax")
        open_PKDS = keys.open_pages[keys.open.table[written].long()].float()
        keys.pages[written] = keys.codec.encode_keys(open_PKDS, counts)
        keys.codec.store_values(values, blocks, offsets, v_TKD.float())

    def forward(
        self,
        q_THD: torch.Tensor,
        keys: QuantisedKeys,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        out_THD = torch.empty_like(q_THD)
        for bucket in self._plans.buckets(metadata, keys.codec.block_size, window, torch.float32):
            rows = slice(None) if bucket.rows is None else bucket.rows
            context = _Context(bucket, keys, values, scale, window, softcap)
            out_THD[rows] = context.attend(q_THD[rows].float()).to(q_THD.dtype)
        return out_THD


class _Context:
    """What a bucket's queries attend to, as float32."""

    def __init__(
        self,
        bucket: Bucket,
        keys: QuantisedKeys,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self._bucket, self._scale, self._window, self._softcap = bucket, scale, window, softcap
        self._block_size = size = keys.codec.block_size
        blocks = bucket.blocks.view(bucket.size, -1)
        first_block = bucket.first_block
        if bucket.shared is not None:
            blocks = torch.cat((bucket.shared.expand(bucket.size, -1), blocks), 1)
            first_block = torch.zeros_like(first_block)
        self._key_at = first_block[:, None] * size + torch.arange(blocks.shape[1] * size, device=blocks.device)
        k_BNKDS = keys.codec.decode_keys(keys.pages[blocks])
        v_BNKSD = keys.codec.decode_values(values[blocks])
        self._k_BKDS = k_BNKDS.permute(0, 2, 3, 1, 4).flatten(3)
        self._v_BKSD = v_BNKSD.transpose(1, 2).flatten(2, 3)
        own = bucket.query_at // size  # [B, Q] each query's own block
        self._first_own = own[:, :1]
        num_own = int((own[:, -1] - own[:, 0]).max()) + 1
        columns = self._first_own - first_block[:, None] + torch.arange(num_own, device=blocks.device)
        pages = keys.open.table[blocks.gather(1, columns.clamp(max=blocks.shape[1] - 1))]
        self._open_BKDS = keys.open_pages[pages.clamp(min=0).long()].float().permute(0, 2, 3, 1, 4).flatten(3)

    def attend(self, q_THD: torch.Tensor) -> torch.Tensor:
        """[B * Q, num_heads, head_dim] float32 -> the same shape."""
        bucket = self._bucket
        q_BQHD = q_THD.unflatten(0, (bucket.size, bucket.num_queries))
        num_rows = max(1, _MOST_SCORES // (bucket.size * q_THD.shape[1] * self._key_at.shape[1]))
        parts = [
            self._attend_rows(q_BQHD[:, first : first + num_rows], bucket.query_at[:, first : first + num_rows])
            for first in range(0, bucket.num_queries, num_rows)
        ]
        return torch.cat(parts, 1).flatten(0, 1)

    def _attend_rows(self, q_BQHD: torch.Tensor, query_at: torch.Tensor) -> torch.Tensor:
        num_kv_heads, num_keys = self._k_BKDS.shape[1], self._key_at.shape[1]
        q_BKRD = q_BQHD.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # R = heads * queries
        scores = q_BKRD @ self._k_BKDS
        own_scores = q_BKRD @ self._open_BKDS
        key_at, query_at = self._key_at[:, None], query_at[..., None]
        column = (key_at - self._first_own[..., None] * self._block_size).clamp(0, own_scores.shape[-1] - 1)
        own_scores = own_scores.gather(3, column[:, None].expand(*scores.shape[:3], num_keys))
        is_own = key_at // self._block_size == query_at // self._block_size  # [B, Q, S]
        seen = key_at <= query_at
        if self._window is not None:
            seen = seen & (key_at > query_at - self._window)
        shape = (*scores.shape[:2], -1, *is_own.shape[1:])
        scores = torch.where(is_own[:, None, None], own_scores.view(shape), scores.view(shape)) * self._scale
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None], -torch.inf), -1)
        mixed = (weights.flatten(2, 3) @ self._v_BKSD).unflatten(2, (-1, q_BQHD.shape[1]))  # [B, K, heads, Q, D]
        return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)
