"""Kernels of every instruction set of this machine, and what a packed linear must give."""

import ctypes
from collections.abc import Sequence

import torch

from warmroot.actors.kernels.library import runnable
from warmroot.actors.kernels.linear import LinearKernels, PackedWeight, WeightFormat, WeightStruct
from warmroot.actors.layers.grouped import GroupedWeight

LIBRARIES = runnable()


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def run(
    kernels: LinearKernels, parts: Sequence[PackedWeight], x: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """y of the parts side by side; added to ``into`` if given."""
    struct = (WeightStruct * len(parts))(*map(WeightStruct.of, parts))
    y = torch.full((x.shape[0], sum(part.shape[0] for part in parts)), torch.nan) if into is None else into
    kernels.linear(x, ctypes.addressof(struct), len(parts), y, accumulate=into is not None)
    return y


def quantised(x: torch.Tensor) -> torch.Tensor:
    """The input as quantised weights see it: 8 bits per row and 32 features."""
    groups = x.reshape(x.shape[0], -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.where(most > 0, torch.tensor(127.0) / most, 0.0)).round()
    return (codes.double() * (most / 127.0).double()).reshape(x.shape)


def expected(kernels: LinearKernels, part: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """In float64, from the unpacked weight."""
    if part.order is not None:
        x = torch.nn.functional.pad(x, (0, 1))[:, part.order.where(part.order >= 0, x.shape[1]).long()]
    seen = x.double()
    if part.format is WeightFormat.BF16:
        seen = x.bfloat16().double()
    elif part.format.is_quantised:
        seen = quantised(x)
    y = seen @ kernels.unpack(part).double().T
    return y if part.bias is None else y + part.bias.double()


def assert_equal_up_to_rounding(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within float32 sums of terms as large as the largest result."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-6 * max(1.0, wanted.abs().max().item()))


def grouped(rows: int, in_features: int, bits: int, group_of: torch.Tensor) -> GroupedWeight:
    """Random codes with zeros, of features in any groups."""
    generator, groups = torch.Generator().manual_seed(rows + bits), int(group_of.max()) + 1
    codes, zeros = (
        torch.randint(0, 1 << bits, (rows, size), generator=generator, dtype=torch.uint8)
        for size in (in_features, groups)
    )
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).half() / (1 << bits - 1)
    return GroupedWeight.of_features(bits, codes, group_of, scales, zeros)


def q4_k_blocks(rows: int, in_features: int) -> torch.Tensor:
    """Random super-blocks with scales of a sensible size."""
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (rows, in_features // 256, 144), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, in_features // 256, 2, generator=generator) * 0.01
    blocks[:, :, :4] = scales.half().view(torch.uint8).reshape(rows, -1, 4)
    return blocks.reshape(rows, -1)
