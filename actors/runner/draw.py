"""The draw: one uniform number per (seed, output index), and the token it falls on.

Nothing is remembered between draws, so a request that was preempted or moved draws on as if nothing had happened, and
what else is in the batch does not matter.
"""

from enum import IntEnum
from hashlib import blake2b

import torch
import torch.nn.functional as F

_TILE = 256


class Stream(IntEnum):
    """What a number is for; those of different streams are independent."""

    TOKEN = 0
    """The token, also where it replaces a draft."""
    TEST = 1
    """Whether a draft stands."""
    DRAFT = 2
    """The draft itself."""


def uniform(seed: int, index: int, stream: Stream = Stream.TOKEN) -> float:
    """In [0, 1), a multiple of 2**-53: the draw for the token at ``index`` of the output."""
    data = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = blake2b(data, digest_size=8, salt=stream.to_bytes(1, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [R] where the running sum over token ids of ``weights`` [R, vocab] passes uniform · total.

    ``uniforms`` is [R] float64. Sums over tiles first, then inside one tile: the same as over all, at a fraction of the
    cost.
    """
    tiles = F.pad(weights, (0, -weights.shape[1] % _TILE)).view(len(weights), -1, _TILE)
    # Rows where everything is masked are NaN: they give token 0 instead of ending the whole batch.
    tile_sums = tiles.sum(2).nan_to_num_(0.0).cumsum(1, dtype=torch.float64)
    target = uniforms[:, None] * tile_sums[:, -1:]
    tile = _find(tile_sums, target)
    before = F.pad(tile_sums, (1, 0)).gather(1, tile)
    chosen = tiles.gather(1, tile[..., None].expand(-1, -1, _TILE)).squeeze(1)
    inside = chosen.nan_to_num_(0.0).cumsum(1, dtype=torch.float64)
    return (tile * _TILE + _find(inside, target - before)).flatten()


def _find(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[R, 1]: the first place where the running sum exceeds the target, at the latest where it stops growing."""
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums, target, right=True), last)
