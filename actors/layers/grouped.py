"""Weights of 4 or 8 bits whose groups of input features share a scale, and how torch multiplies by them.

The form that GPTQ and AWQ checkpoints are read into, and that kernels pack from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
import torch.nn.functional as F

_TILE_VALUES = 1 << 24
"""Values of a weight that torch has dequantised at a time."""
_UNIT = 32
"""Columns that kernels let share a scale: groups are filled up to a multiple of it where they have to be."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """w[n, order[k]] = scales[n, g] * (codes[n, k] - zeros[n, g]) of group g = k // group, 0 elsewhere."""

    bits: Literal[4, 8]
    codes: torch.Tensor
    """uint8 [out_features, columns]"""
    scales: torch.Tensor
    """float16 [out_features, groups]"""
    zeros: torch.Tensor | None
    """uint8 [out_features, groups]; None: all are 2^(bits - 1)."""
    in_features: int
    order: torch.Tensor | None = None
    """int32 [columns]: the input feature of each column, -1 for those that only fill groups up; None: one by one."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, columns)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    @classmethod
    def of_features(
        cls,
        bits: Literal[4, 8],
        codes: torch.Tensor,
        group_of: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
    ) -> "GroupedWeight":
        """From codes [out_features, in_features] whose feature k is in any group ``group_of[k]`` (int64) at all.

        Features come in the order of their groups. Where groups are not of one size, as in a part of a weight that was
        quantised in the order of activations, each is filled up to a multiple of 32 columns.
        """
        in_features = codes.shape[1]
        counts = group_of.bincount(minlength=scales.shape[1])
        common = gcd(*counts.tolist())
        unit = common if common % _UNIT == 0 else _UNIT
        sizes = (counts + unit - 1) // unit * unit
        rows = torch.arange(len(counts)).repeat_interleave(sizes // unit)
        order = _columns(group_of, counts, sizes)
        grouped = cls(bits, codes, scales[:, rows], None if zeros is None else zeros[:, rows], in_features)
        if torch.equal(order, torch.arange(in_features)):
            return grouped
        moved = codes[:, order.clamp(min=0)].contiguous()
        return replace(grouped, codes=moved, order=order.to(torch.int32))

    def dequantise(self) -> torch.Tensor:
        """float32 [out_features, in_features], without rounding."""
        values = _values(self.codes, self.scales, self.zeros, self.bits, torch.float32)
        if self.order is None:
            return values
        out = values.new_zeros(values.shape[0], self.in_features)
        kept = self.order >= 0
        out[:, self.order[kept].long()] = values[:, kept]
        return out


def stacked(weights: Iterable[GroupedWeight]) -> list[GroupedWeight]:
    """Neighbours that take their input alike become one."""
    found: list[GroupedWeight] = []
    for weight in weights:
        joins = found and _is_like(found[-1], weight)
        found.append(_join(found.pop(), weight) if joins else weight)
    return found


@dataclass(frozen=True, slots=True)
class TorchCodes:
    """A ``GroupedWeight`` as torch multiplies by it: two codes of 4 bits are a byte."""

    bits: Literal[4, 8]
    codes: torch.Tensor
    """uint8 [out_features, columns * bits / 8]"""
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    """int32 [columns]: as in ``GroupedWeight``, but features that are not there are that behind the last one."""

    @classmethod
    def of(cls, weight: GroupedWeight, device: torch.device) -> "TorchCodes":
        """Copied to a device."""
        codes = weight.codes if weight.bits == 8 else weight.codes[:, 0::2] | weight.codes[:, 1::2] << 4
        order = None if weight.order is None else weight.order.where(weight.order >= 0, weight.in_features)
        return cls(
            weight.bits,
            codes.to(device),
            weight.scales.to(device),
            None if weight.zeros is None else weight.zeros.to(device),
            None if order is None else order.to(device),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it holds."""
        return [tensor for tensor in (self.codes, self.scales, self.zeros, self.order) if tensor is not None]

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> "TorchCodes":
        """One of the same form that holds the next of ``tensors``."""
        codes, scales = next(tensors), next(tensors)
        zeros = None if self.zeros is None else next(tensors)
        return replace(
            self, codes=codes, scales=scales, zeros=zeros, order=None if self.order is None else next(tensors)
        )

    def multiply(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Of [T, in_features] the outputs [T, rows] of each tile of the weight."""
        if self.order is not None:
            x = F.pad(x, (0, 1)).index_select(1, self.order)
        rows = max(1, _TILE_VALUES * self.bits // (8 * self.codes.shape[1]))
        return [F.linear(x, self._tile(slice(row, row + rows), x.dtype)) for row in range(0, self.codes.shape[0], rows)]

    def _tile(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        codes = self.codes[rows]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        return _values(codes, self.scales[rows], None if self.zeros is None else self.zeros[rows], self.bits, dtype)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Weights of one input that stay codes: torch dequantises some rows at a time and multiplies by them."""

    parts: tuple[TorchCodes, ...]
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weights: Iterable[GroupedWeight], bias: torch.Tensor | None, device: torch.device) -> "GroupedLinear":
        """Of weights side by side."""
        parts = tuple(TorchCodes.of(weight, device) for weight in stacked(weights))
        return cls(parts, None if bias is None else bias.to(device))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it holds."""
        parts = [tensor for part in self.parts for tensor in part.tensors]
        return parts if self.bias is None else [*parts, self.bias]

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> "GroupedLinear":
        """One of the same form that holds the next of ``tensors``."""
        parts = tuple(part.with_tensors(tensors) for part in self.parts)
        return GroupedLinear(parts, None if self.bias is None else next(tensors))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.apply``."""
        y = torch.cat([tile for part in self.parts for tile in part.multiply(x)], -1)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def _columns(group_of: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """int64 [sum of sizes]: the features of each group in their order, then -1 up to its size."""
    columns = torch.full((int(sizes.sum()),), -1)
    features = group_of.argsort(stable=True)
    groups = group_of[features]
    rank = torch.arange(len(features)) - (counts.cumsum(0) - counts)[groups]
    columns[(sizes.cumsum(0) - sizes)[groups] + rank] = features
    return columns


def _values(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    whole = codes.unflatten(1, (scales.shape[1], -1)).to(dtype)
    whole = whole - (1 << bits - 1 if zeros is None else zeros.to(dtype)[:, :, None])
    return (whole * scales.to(dtype)[:, :, None]).flatten(1)


def _is_like(one: GroupedWeight, other: GroupedWeight) -> bool:
    if (one.order is None) != (other.order is None) or (one.zeros is None) != (other.zeros is None):
        return False
    same_order = one.order is None or other.order is None or torch.equal(one.order, other.order)
    return same_order and (one.bits, one.group, one.shape[1]) == (other.bits, other.group, other.shape[1])


def _join(one: GroupedWeight, other: GroupedWeight) -> GroupedWeight:
    zeros = None if one.zeros is None or other.zeros is None else torch.cat((one.zeros, other.zeros))
    codes, scales = torch.cat((one.codes, other.codes)), torch.cat((one.scales, other.scales))
    return replace(one, codes=codes, scales=scales, zeros=zeros)
