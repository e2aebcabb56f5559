"""Affine grids: weight = (code - zero point) * scale, one scale and zero point per row and group of inputs."""

from dataclasses import dataclass

import torch

_SHRINKS = torch.linspace(1.0, 0.4, 49).tolist()
"""Shares of a group's range that are tried: what lies outside is clipped, what is inside gets finer steps."""
_MIN_SCALE = 2.0**-14
"""The smallest normal float16."""


@dataclass(frozen=True, slots=True)
class Grid:
    """``scales`` (values of float16) and ``zeros`` (whole numbers), both float32 [out, groups]."""

    scales: torch.Tensor
    zeros: torch.Tensor
    max_code: int

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest codes of weights [out, groups, size], as float32."""
        return weight.div(self.scales[..., None]).add_(self.zeros[..., None]).round_().clamp_(0, self.max_code)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes [out, groups, size] stand for."""
        return (codes - self.zeros[..., None]).mul_(self.scales[..., None])

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest points of the grid."""
        return self.values(self.codes(weight))


def fit(
    weight: torch.Tensor,
    max_code: int,
    *,
    symmetric: bool,
    importance: torch.Tensor | None = None,
) -> Grid:
    """The grid of weights [out, groups, size] with the least squared error over shares of their range.

    ``importance`` weighs the errors: [groups, size] for each input, or [groups, size, size] as the inputs' second
    moments, which makes it the error of the group's output.
    """
    low, high = _ends(weight)
    best = grid_over(low, high, max_code, symmetric=symmetric)
    least = _errors(weight, best, importance)
    for shrink in _SHRINKS[1:]:
        grid = grid_over(low * shrink, high * shrink, max_code, symmetric=symmetric)
        errors = _errors(weight, grid, importance)
        better = errors < least
        least = torch.where(better, errors, least)
        best = Grid(
            torch.where(better, grid.scales, best.scales), torch.where(better, grid.zeros, best.zeros), max_code
        )
    return best


def whole_range(weight: torch.Tensor, max_code: int, *, symmetric: bool) -> Grid:
    """The grid of weights [out, groups, size] that clips none of them."""
    return grid_over(*_ends(weight), max_code, symmetric=symmetric)


def _ends(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each group; zero is between them."""
    return weight.amin(-1).clamp_(max=0.0), weight.amax(-1).clamp_(min=0.0)


def grid_over(low: torch.Tensor, high: torch.Tensor, max_code: int, *, symmetric: bool) -> Grid:
    """The grid with these ends, both [out, groups]."""
    width = 2.0 * torch.maximum(-low, high) if symmetric else high - low
    # Rounded as they will be stored, so that codes are chosen for what a reader computes.
    scales = (width / max_code).clamp_(min=_MIN_SCALE).half().float()
    middle = torch.full_like(scales, (max_code + 1) // 2)
    # GPTQ stores the zero point less one, and readers disagree on what -1 means: zero never is a zero point.
    zeros = middle if symmetric else (-low / scales).round_().clamp_(1, max_code)
    return Grid(scales, zeros, max_code)


def grouped(weight: torch.Tensor, size: int) -> torch.Tensor:
    """[out, in] -> [out, groups, size], the last group filled up with zeros."""
    missing = -weight.shape[1] % size
    return torch.nn.functional.pad(weight, (0, missing)).unflatten(1, (-1, size))


def _errors(weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None) -> torch.Tensor:
    """[out, groups]."""
    error = grid.rounded(weight).sub_(weight)
    if importance is None:
        return error.square_().sum(-1)
    if importance.dim() == 2:
        return error.square_().mul_(importance).sum(-1)
    return torch.matmul(error.transpose(0, 1), importance).mul_(error.transpose(0, 1)).sum(-1).t()
