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
"""A tensor of a checkpoint by its stored name, read where it is sliced. Raises KeyError if there is none."""


def gptq_shape(config: QuantizationConfig, qweight: Shape) -> Shape:
    """(out_features, in_features) of a linear by the shape of its qweight."""
    return qweight[1], qweight[0] * (32 // config.bits)


def read_gptq(config: QuantizationConfig, read: ReadSlice, module: str, part: Part) -> GroupedWeight:
    """The part (out_features, in_features) of a linear. Raises KeyError and ValueError for a damaged one."""
    rows, columns = part
    bits, pack = config.bits, 32 // config.bits
    qweight = read(f"{module}.qweight")
    words, inner = cover(columns, pack)
    codes = unpack(qweight[words, rows.start : rows.stop].t(), bits)[:, inner]
    words, inner = cover(rows, pack)
    zeros = unpack(read(f"{module}.qzeros")[:, words], bits)[:, inner].t()
    if config.checkpoint_format == "gptq":
        zeros = zeros + 1 & (1 << bits) - 1
    is_plain = config.sym and bool((zeros == 1 << bits - 1).all())
    return GroupedWeight.of_features(
        bits,
        codes.contiguous(),
        _groups(config, read, module, columns, qweight.get_shape()[0] * pack),
        read_scales(config, read, module, rows, qweight.get_shape()[0] * pack),
        None if is_plain else zeros.contiguous(),
    )


def read_scales(
    config: QuantizationConfig, read: ReadSlice, module: str, rows: range, in_features: int
) -> torch.Tensor:
    """float16 [rows, groups]. Raises ValueError if there are not as many groups as the settings say."""
    stored = read(f"{module}.scales")
    found, expected = stored.get_shape()[0], -(-in_features // config.group_of(in_features))
    if found != expected:
        raise ValueError(f"it has {found} groups, expected {expected}")
    return stored[:, rows.start : rows.stop].t().half()


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits first."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def cover(extent: range, pack: int) -> tuple[slice, slice]:
    """The words that hold a range of codes, and where it lies in what they hold."""
    first, last = extent.start // pack, -(-extent.stop // pack)
    return slice(first, last), slice(extent.start - first * pack, extent.stop - first * pack)


def _groups(config: QuantizationConfig, read: ReadSlice, module: str, columns: range, in_features: int) -> torch.Tensor:
    """int64 [columns]; some tools leave g_idx away where it says nothing new."""
    try:
        groups = read(f"{module}.g_idx")[columns.start : columns.stop].long()
    except KeyError:
        if config.desc_act:
            raise
        return torch.arange(columns.start, columns.stop) // config.group_of(in_features)
    most = -(-in_features // config.group_of(in_features))
    if groups.shape != (len(columns),) or not 0 <= int(groups.min()) <= int(groups.max()) < most:
        raise ValueError(f"g_idx does not name one of {most} groups for each of {in_features} features")
    return groups
