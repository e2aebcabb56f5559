"""Linears as AutoAWQ stores them (version gemm).

qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8]: the nibbles of an int32, the lowest first, are outputs
0, 2, 4, 6, 1, 3, 5, 7 of its eight. scales float16 [groups, out].
"""

import torch

from ...cluster.quantization_config import QuantizationConfig
from ..layers.grouped import GroupedWeight
from .gptq import ReadSlice, cover, read_scales, unpack
from .tensors import Part, Shape

_PACK = 8
_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight outputs is."""


def awq_shape(qweight: Shape) -> Shape:
    """(out_features, in_features) of a linear by the shape of its qweight."""
    return qweight[1] * _PACK, qweight[0]


def read_awq(config: QuantizationConfig, read: ReadSlice, module: str, part: Part) -> GroupedWeight:
    """The part (out_features, in_features) of a linear. Raises KeyError and ValueError for a damaged one."""
    rows, columns = part
    words, inner = cover(rows, _PACK)
    qweight = read(f"{module}.qweight")
    codes = _unpack(qweight[columns.start : columns.stop, words])[:, inner].t()
    zeros = _unpack(read(f"{module}.qzeros")[:, words])[:, inner].t()
    in_features = qweight.get_shape()[0]
    scales = read_scales(config, read, module, rows, in_features)
    group_of = torch.arange(columns.start, columns.stop) // config.group_of(in_features)
    return GroupedWeight.of_features(4, codes.contiguous(), group_of, scales, zeros.contiguous())


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> uint8 [n, out]"""
    return unpack(words, 4).unflatten(1, (-1, _PACK))[:, :, list(_NIBBLE_OF)].flatten(1)
