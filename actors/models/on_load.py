"""Linears that torch quantises when they are loaded; for the native kernels ``kernels.linear.pack`` does it."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..layers.grouped import GroupedLinear, GroupedWeight
from ..quantize.grid import fit, grid_over, grouped


@dataclass(frozen=True, slots=True)
class QuantisingMethod:
    """Codes of 4 bits with zeros, or 8 bits, ``group`` input features to a scale. Implements ``LinearMethod``."""

    bits: Literal[4, 8]
    group: int
    device: torch.device

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> GroupedLinear:
        """See ``LinearMethod.prepare``."""
        return GroupedLinear.of([self._quantise(weight.to(self.device, torch.float32))], bias, self.device)

    def _quantise(self, weight: torch.Tensor) -> GroupedWeight:
        """Scales of 8 bits reach the largest weight; grids of 4 bits are searched for the least squared error."""
        blocks, most = grouped(weight, self.group), (1 << self.bits) - 1
        if self.bits == 4:
            grid = fit(blocks, most, symmetric=False)
        else:
            grid = grid_over(blocks.amin(-1), blocks.amax(-1), most, symmetric=True)
        codes = grid.codes(blocks).to(torch.uint8).flatten(1)[:, : weight.shape[1]]
        group_of = torch.arange(weight.shape[1]) // self.group
        zeros = grid.zeros.to(torch.uint8).cpu() if self.bits == 4 else None
        return GroupedWeight.of_features(self.bits, codes.cpu(), group_of, grid.scales.half().cpu(), zeros)
