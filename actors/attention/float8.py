"""KV in eight-bit floats (e4m3) in plain torch: what is stored, and attention over it.

A token's keys, or values, of one head are an entry of their own: codes and a scale. So tokens do not depend on each
other, and pages are shared, copied and written over as those of plain floats are (``docs/kv_formats.md``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from ...cluster.kv_formats import FLOAT_SCALE_BYTES
from .buckets import Bucket, BucketPlans
from .interface import AttentionMetadata, KvPages
from .kv_codec import bfloat_above, bfloat_bytes, copied

_LARGEST = 448.0
"""Of e4m3 (Micikevicius et al., arXiv 2209.05433)."""
_LEAST_SCALE = 2.0**-100
"""Far from where dividing by it overflows; an entry of zeros needs one, too."""
_HALVES_SHRINK = 2.0**8
"""By the difference of the exponents' biases, 15 and 7."""
MOST_ELEMENTS = 1 << 24
"""Of keys, of values and of scores that are floats at a time."""


def is_float8(pages: KvPages) -> TypeGuard[torch.Tensor]:
    """Whether they are bytes of entries, [num_blocks, block_size, num_kv_heads, head_dim + 2]."""
    return isinstance(pages, torch.Tensor) and pages.dtype == torch.uint8


def page_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Of a page of keys, and of one of values."""
    return block_size, num_kv_heads, head_dim + FLOAT_SCALE_BYTES


def encode(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> entries [..., D + 2], bytes."""
    x = x.float()
    scales = bfloat_above((x.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=_LEAST_SCALE))
    codes = (x / scales).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), bfloat_bytes(scales)), -1)


def decode(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D + 2] -> [..., D]."""
    codes, scale_bytes = entries.split((entries.shape[-1] - FLOAT_SCALE_BYTES, FLOAT_SCALE_BYTES), -1)
    scales = copied(scale_bytes).view(torch.bfloat16) * _HALVES_SHRINK
    # float16 would lose small scales: torch multiplies it with bfloat16 in float32.
    return (_shrunk_halves(codes).to(dtype) * scales).to(dtype)


def _shrunk_halves(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of e4m3 -> float16, by their bits: the exponent gets a higher bit. torch's own cast is not vectorised."""
    wide = codes.view(torch.int8).to(torch.int16)  # the sign is in the higher byte's bits
    return wide.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def store(x_TKD: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Keys, or values, of T tokens at their slots, in place."""
    cache.view(-1, *cache.shape[2:])[slot_mapping] = encode(x_TKD)


@dataclass(slots=True)
class Float8Attention:
    """Part of the torch and flash backends; metadata must not change in place."""

    most_elements: int = MOST_ELEMENTS
    _plans: BucketPlans = field(default_factory=BucketPlans)

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
        out_THD = torch.empty_like(q_THD)
        for bucket in self._plans.buckets(metadata, k_cache.shape[1], window, torch.float32):
            rows = slice(None) if bucket.rows is None else bucket.rows
            tiles = _tiles(bucket, q_THD[rows], k_cache, self.most_elements)
            out_THD[rows] = _attend(q_THD[rows], k_cache, v_cache, bucket.size, tiles, scale, softcap)
        return out_THD


def _attend(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    size: int,
    tiles: "Iterator[_Tile]",
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[B * Q, num_heads, head_dim] -> the same shape.

    Tile by tile, with a running softmax (Milakov and Gimelshein, arXiv 1805.02867).
    """
    num_kv_heads = k_cache.shape[2]
    q_BQKGD = q_THD.unflatten(0, (size, -1)).unflatten(2, (num_kv_heads, -1))
    q_BKGQD = q_BQKGD.permute(0, 2, 3, 1, 4)
    q_BKRD = q_BKGQD.flatten(2, 3)
    largest = q_BKRD.new_full((*q_BKRD.shape[:3], 1), torch.finfo(torch.float32).min, dtype=torch.float32)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(q_BKRD, dtype=torch.float32)
    for tile in tiles:
        k_BSKD, v_BSKD = (decode(_gather(cache, tile), q_THD.dtype) for cache in (k_cache, v_cache))
        scores = (q_BKRD @ k_BSKD.permute(0, 2, 3, 1)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if tile.bias is not None:
            scores = (scores.unflatten(2, q_BKGQD.shape[2:4]) + tile.bias).flatten(2, 3)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrunk = torch.exp(scores - largest), torch.exp(before - largest)
        total = total * shrunk + weights.sum(-1, keepdim=True)
        mixed = mixed * shrunk + weights.to(q_THD.dtype) @ v_BSKD.transpose(1, 2)
    out_BKGQD = (mixed / total).to(q_THD.dtype).view(q_BKGQD.shape)
    return out_BKGQD.permute(0, 3, 1, 2, 4).reshape(q_THD.shape)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some of the keys of a bucket's sequences."""

    blocks: torch.Tensor
    """[B, blocks]"""
    num_keys: int
    bias: torch.Tensor | None
    """Broadcast to [B, K, G, Q, num_keys]; None: all are seen."""


def _gather(cache: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """[B, num_keys, K, D + 2]. ``index_select`` copies whole pages, indexing goes element by element."""
    pages = cache.index_select(0, tile.blocks.flatten())
    return pages.view(len(tile.blocks), -1, *cache.shape[2:])[:, : tile.num_keys]


def _tiles(bucket: Bucket, q_THD: torch.Tensor, k_cache: torch.Tensor, most_elements: int) -> Iterator[_Tile]:
    """Of so many blocks that neither keys, values nor scores have more elements."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_heads, head_dim = q_THD.shape[1:]
    key_elements = bucket.size * max(num_kv_heads * head_dim, num_heads * bucket.num_queries)
    count = max(1, most_elements // (key_elements * block_size))
    if bucket.shared is not None:  # no query fails to see these
        for blocks in bucket.shared.split(count):
            yield _Tile(blocks.expand(bucket.size, -1), len(blocks) * block_size, None)
    first = 0
    for blocks in bucket.blocks.view(bucket.size, -1).split(count, 1):
        num_keys = min(blocks.shape[1] * block_size, bucket.num_keys - first)
        yield _Tile(blocks, num_keys, _bias(bucket, first, num_keys))
        first += num_keys


def _bias(bucket: Bucket, first: int, num_keys: int) -> torch.Tensor | None:
    """Of keys [first, first + num_keys) of the bucket's own."""
    if bucket.is_causal:
        shape, device = (bucket.num_queries, num_keys), bucket.blocks.device
        hidden = torch.ones(shape, dtype=torch.bool, device=device).triu_(1 - first)
        return torch.zeros(shape, device=device).masked_fill_(hidden, -torch.inf)
    return None if bucket.bias is None else bucket.bias[:, :, None, :, first : first + num_keys]
