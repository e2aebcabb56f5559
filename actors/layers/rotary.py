"""Rotary position embedding (Su et al., 2021) and its scalings, in Hugging Face's half-split layout."""

import math

import torch

from ...cluster.model_spec import RopeSpec
from ..kernels.pointwise import is_native_input

_FIRST_POSITIONS = 1024
"""Least length of a table of angles."""


class RotaryEmbedding:
    """Angles of one kind of layer. They depend on the token's position alone, so that a cached key never goes stale.

    ``dynamic`` (NTK-aware) therefore rotates a token as if it were the last of its sequence, which is what
    token-by-token decoding with a cache does everywhere.
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._rope = rope
        self._inverse_frequencies = inverse_frequencies(rope).to(device)
        self._scale = attention_scale(rope)
        self._table = self._angles_at(torch.arange(0, device=device))

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [T] -> cos [T, 1, rotary_dim] and sin [T, 1, rotary_dim / 2], for ``rotate``."""
        cos, sin = (part[:, None] for part in self._angles_at(positions))
        return torch.cat((cos, cos), -1).to(dtype), sin.to(dtype)

    def table(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cos and sin [P, rotary_dim / 2] float32 of positions 0 ... P - 1, with P at least ``num_positions``."""
        if num_positions > len(self._table[0]):
            # Twice what is asked for: a context that grows by single tokens computes a table now and then.
            length = max(2 * num_positions, _FIRST_POSITIONS)
            self._table = self._angles_at(torch.arange(length, device=self._inverse_frequencies.device))
        return self._table

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [T] -> cos and sin [T, rotary_dim / 2] float32, contiguous: the same values as ``angles``."""
        cos, sin = self.table(int(positions.max()) + 1 if len(positions) else 0)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _angles_at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = self._inverse_frequencies
        if self._rope.scaling_type == "dynamic":
            frequencies = _dynamic_frequencies(self._rope, positions)
        angle = positions[:, None].float() * frequencies
        return angle.cos() * self._scale, angle.sin() * self._scale


def rotate(x_TND: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first rotary_dim elements of each head of x [T, N, D]; a new tensor."""
    cos, sin = angles
    rotary_dim = cos.shape[-1]
    if is_native_input(x_TND):
        out = x_TND.clone(memory_format=torch.contiguous_format)
        torch.ops.warmroot.rotary.default(out, cos[:, 0, : rotary_dim // 2], sin[:, 0])
        return out
    turned = x_TND[..., :rotary_dim]
    out = turned * cos
    out_left, out_right = out.chunk(2, -1)
    left, right = turned.chunk(2, -1)
    out_left.addcmul_(right, sin, value=-1)
    out_right.addcmul_(left, sin)
    return out if rotary_dim == x_TND.shape[-1] else torch.cat((out, x_TND[..., rotary_dim:]), -1)


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim)
    if rope.scaling_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling_type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.scaling_type == "yarn":
        frequencies = _yarn(rope, frequencies)
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    return frequencies


def attention_scale(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: YaRN sharpens attention in step with its stretch."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling_type == "yarn" and rope.factor > 1.0:
        return 0.1 * math.log(rope.factor) + 1.0
    return 1.0


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Peng et al., 2023: a ramp over the dimensions between stretched and kept frequencies."""

    def dimension(turns: float) -> float:
        return (
            rope.rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(rope.rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - stretch + stretch / rope.factor)


def _dynamic_frequencies(rope: RopeSpec, positions: torch.Tensor) -> torch.Tensor:
    """[T, rotary_dim / 2]: the base grows once a position passes the context the model was trained on."""
    dim, trained = rope.rotary_dim, rope.original_max_position
    # In float64: a float32 power's last digit depends on where in the batch it lies, and far positions multiply it.
    length = (positions + 1).clamp(min=trained).double()
    theta = rope.theta * (rope.factor * length / trained - (rope.factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=positions.device).double() / dim
    return (1.0 / theta[:, None] ** exponents).float()
