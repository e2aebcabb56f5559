"""AWQ (Lin et al., arXiv 2306.00978): inputs with large activations get finer weights, by scales that fold away.

A scale s per input multiplies the weight's columns and divides what makes the input: a norm's weight, or the rows of
the linear before. Powers of the mean activation are tried; the one with the least output error stays.
"""

from dataclasses import dataclass

import torch

from .grid import fit, grouped, whole_range
from .quantised import QuantisedLinear, output_error, round_to_grid
from .settings import QuantizeSettings

_POWERS = torch.linspace(0.0, 1.0, 21).tolist()
_LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class InputMoments:
    """Of a linear's inputs: ``gram`` [in, in] is the mean of x xᵀ, ``size`` [in] that of |x|."""

    gram: torch.Tensor
    size: torch.Tensor


def awq_scales(weight: torch.Tensor, moments: InputMoments, settings: QuantizeSettings) -> torch.Tensor:
    """The scales [in] with the least output error of a weight [out, in]."""
    candidates = [_scales(moments.size, power) for power in _POWERS]
    errors = [output_error(_rounding_error(weight, scales, settings), moments.gram) for scales in candidates]
    return candidates[errors.index(min(errors))]


def awq_round(weight: torch.Tensor, gram: torch.Tensor, settings: QuantizeSettings) -> QuantisedLinear:
    """Round a scaled weight [out, in], each group clipped where its own output error is least."""
    size = settings.group_of(weight.shape[1])
    blocks = gram.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    grid = fit(grouped(weight, size), settings.max_code, symmetric=False, importance=blocks.contiguous())
    return round_to_grid(weight, grid, size)


def shared_size(size: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Mean activations [heads * head_dim] of the output projection, alike for the heads that share a value head."""
    by_head = size.view(num_kv_heads, -1, head_dim)
    return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)


def _scales(size: torch.Tensor, power: float) -> torch.Tensor:
    scales = size.pow(power).clamp_(min=_LEAST)
    return scales / (scales.max() * scales.min()).sqrt()


def _rounding_error(weight: torch.Tensor, scales: torch.Tensor, settings: QuantizeSettings) -> torch.Tensor:
    """What plain rounding of the scaled weight does to the unscaled one."""
    size = settings.group_of(weight.shape[1])
    scaled = grouped(weight * scales, size)
    grid = whole_range(scaled, settings.max_code, symmetric=False)
    return grid.rounded(scaled).flatten(1).div_(scales).sub_(weight)
