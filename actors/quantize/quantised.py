"""What quantising a linear gives, whatever the method."""

from dataclasses import dataclass

import torch

from .grid import Grid


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """Codes of a weight [out, in], and which group of the grid each input is in."""

    codes: torch.Tensor
    """[out, in] uint8."""
    grid: Grid
    groups: torch.Tensor
    """[in] int64."""

    def weight(self) -> torch.Tensor:
        """What the codes stand for, float32 [out, in]."""
        return (self.codes.float() - self.grid.zeros[:, self.groups]).mul_(self.grid.scales[:, self.groups])

    def rows(self, begin: int, end: int) -> "QuantisedLinear":
        """Of some outputs."""
        grid = Grid(self.grid.scales[begin:end], self.grid.zeros[begin:end], self.grid.max_code)
        return QuantisedLinear(self.codes[begin:end], grid, self.groups)


def round_to_grid(weight: torch.Tensor, grid: Grid, size: int) -> QuantisedLinear:
    """The nearest codes of a weight [out, in] whose groups are ``size`` neighbours."""
    num_inputs = weight.shape[1]
    groups = torch.arange(num_inputs) // size
    codes = weight.div(grid.scales[:, groups]).add_(grid.zeros[:, groups]).round_().clamp_(0, grid.max_code)
    return QuantisedLinear(codes.to(torch.uint8), grid, groups)


def output_error(error: torch.Tensor, gram: torch.Tensor) -> float:
    """Mean squared change of the outputs by an ``error`` [out, in] of a weight; ``gram`` [in, in]: mean of x xᵀ."""
    return float((error @ gram).mul_(error).sum())
