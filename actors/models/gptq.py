"""Linears as AutoGPTQ and gptqmodel store them (``checkpoint_format`` gptq and gptq_v2).

qweight int32 [in / pack, out], the first input feature in the lowest bits; qzeros int32 [groups, out / pack]; scales
float16 [groups, out]; g_idx int32 [in], the group of each input feature. pack = 32 / bits codes are one int32.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...cluster.quantization_config import QuantizationConfig
from ..layers.grouped import GroupedWeight
from .tensors import Part, Shape

ReadSlice = Callable[[str], Any]
"""A tensor of a checkpoint by its stored name, read where it is sliced; None if there is none."""


def gptq_shape(config: QuantizationConfig, qweight: Shape) -> Shape:
    """(out_features, in_features) of a linear by the shape of its qweight."""
    return qweight[1], qweight[0] * (32 // config.bits)


def read_gptq(config: QuantizationConfig, read: ReadSlice, module: str, part: Part) -> GroupedWeight:
    """The part (out_features, in_features) of a linear."""
    rows, columns = part
    bits, pack = config.bits, 32 // config.bits
    words, inner = cover(columns, pack)
    codes = unpack(read(f"{module}.qweight")[words, rows.start : rows.stop].t(), bits)[:, inner]
    words, inner = cover(rows, pack)
    zeros = unpack(read(f"{module}.qzeros")[:, words], bits)[:, inner].t()
    if config.checkpoint_format == "gptq":
        zeros = zeros + 1 & (1 << bits) - 1
    scales = read(f"{module}.scales")[:, rows.start : rows.stop].t()
    is_plain = config.sym and bool((zeros == 1 << bits - 1).all())
    groups = read(f"{module}.g_idx")
    if groups is None:
        group_of = torch.arange(columns.start, columns.stop) // _group_size(config, read, module)
    else:
        group_of = groups[columns.start : columns.stop].long()
    return GroupedWeight.of_features(
        bits, codes.contiguous(), group_of, scales.half(), None if is_plain else zeros.contiguous()
    )


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits first."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def cover(extent: range, pack: int) -> tuple[slice, slice]:
    """The words that hold a range of codes, and where it lies in what they hold."""
    first, last = extent.start // pack, -(-extent.stop // pack)
    return slice(first, last), slice(extent.start - first * pack, extent.stop - first * pack)


def _group_size(config: QuantizationConfig, read: ReadSlice, module: str) -> int:
    """Of a checkpoint without g_idx."""
    if config.group_size > 0:
        return config.group_size
    return read(f"{module}.qweight").get_shape()[0] * (32 // config.bits)
