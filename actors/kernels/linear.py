"""Linears over packed weights: ``native/linear*.cpp``.

A weight is packed once, into panels of 16 output features: floats, or codes of 8 or 4 bits with a float16 scale per
32 input features. Quantised weights quantise their input too, to 8 bits per row and 32 features, and may take it in an
order of their own.
"""

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch

from ...cluster.errors import ConfigError, ModelLoadError
from ..layers.grouped import GroupedWeight
from ..layers.linear import Linear, LinearMethod
from .library import NativeLibrary, native

GROUP = 32
"""Input features that share a scale in a quantised weight."""
_PANEL = 16
_ROWS_AT_ONCE = 4096
"""Rows of a weight that are widened to float32 at a time; whole panels."""


class WeightFormat(IntEnum):
    """What a packed weight's values are (``wr_format``)."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8 = 3
    Q4 = 4

    @property
    def is_quantised(self) -> bool:
        """Whether groups of input features share a scale."""
        return self >= WeightFormat.Q8


class Offsets(IntEnum):
    """What groups of a quantised weight have besides their scale (``wr_offsets``)."""

    NONE = 0
    """w = scale * (code - 2^(bits - 1))"""
    MINIMA = 1
    """w = scale * code + minimum"""
    ZEROS = 2
    """w = scale * (code - zero)"""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels."""

    format: WeightFormat
    offsets: Offsets
    shape: tuple[int, int]
    """(out_features, columns): a column for each input feature, or for each entry of ``order``."""
    data: torch.Tensor
    """uint8 [bytes], aligned to 64 bytes; see ``native/linear.h``."""
    bias: torch.Tensor | None = None
    """float32 [out_features]"""
    order: torch.Tensor | None = None
    """int32 [columns]: which input feature each column of a quantised weight takes, -1: none."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return tuple(tensor for tensor in (self.data, self.bias, self.order) if tensor is not None)


class WeightStruct(ctypes.Structure):
    """wr_weights"""

    _fields_ = [
        ("format", c_int32),
        ("offsets", c_int32),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
        ("order", c_void_p),
    ]

    @classmethod
    def of(cls, weight: PackedWeight) -> "WeightStruct":
        """Points into the weight's memory, which the caller keeps."""
        bias, order = (None if tensor is None else tensor.data_ptr() for tensor in (weight.bias, weight.order))
        return cls(int(weight.format), int(weight.offsets), *weight.shape, weight.data.data_ptr(), bias, order)


@dataclass(frozen=True, slots=True)
class _BlockFormat:
    """How one of GGUF's block formats is packed."""

    format: WeightFormat
    offsets: Offsets
    features: int
    """Input features of a block."""


_BLOCK_FORMATS = {
    2: _BlockFormat(WeightFormat.Q4, Offsets.NONE, 32),  # Q4_0
    3: _BlockFormat(WeightFormat.Q4, Offsets.MINIMA, 32),  # Q4_1
    8: _BlockFormat(WeightFormat.Q8, Offsets.NONE, 32),  # Q8_0
    12: _BlockFormat(WeightFormat.Q4, Offsets.MINIMA, 256),  # Q4_K
}


class LinearKernels:
    """The C functions of one library, on CPU tensors."""

    def __init__(self, library: NativeLibrary) -> None:
        functions = library.functions
        self._packed_bytes = functions.wr_packed_bytes
        self._packed_bytes.argtypes = (c_int32, c_int32, c_int64, c_int64)
        self._packed_bytes.restype = c_int64
        self._pack = functions.wr_pack
        self._pack.argtypes = (c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p)
        self._pack_codes = functions.wr_pack_codes
        self._pack_codes.argtypes = (c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_void_p)
        self._pack_gguf = functions.wr_pack_gguf
        self._pack_gguf.argtypes = (c_void_p, c_int32, c_int64, c_int64, c_void_p)
        self._unpack = functions.wr_unpack
        self._unpack.argtypes = (POINTER(WeightStruct), c_void_p)
        self._linear = functions.wr_linear
        self._linear.argtypes = (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32)
        for function in (self._pack, self._pack_codes, self._unpack, self._linear):
            function.restype = None

    def packed_bytes(self, format: WeightFormat, offsets: Offsets, out_features: int, columns: int) -> int:
        """See ``packed_bytes``."""
        return int(self._packed_bytes(int(format), int(offsets), out_features, columns))

    def pack(
        self, weight: torch.Tensor, format: WeightFormat, bias: torch.Tensor | None = None, group: int = GROUP
    ) -> PackedWeight:
        """See ``pack``."""
        out_features, in_features = weight.shape
        if format.is_quantised and in_features % GROUP:
            raise ConfigError(f"{format.name} weights need in_features divisible by {GROUP}, got {in_features}")
        offsets = Offsets.ZEROS if format is WeightFormat.Q4 else Offsets.NONE
        data = self._room(format, offsets, out_features, in_features)
        panel_bytes = self.packed_bytes(format, offsets, _PANEL, in_features)
        for row in range(0, out_features, _ROWS_AT_ONCE):
            rows = weight[row : row + _ROWS_AT_ONCE].float().contiguous()
            to = data.data_ptr() + row // _PANEL * panel_bytes
            self._pack(rows.data_ptr(), int(format), group, rows.shape[0], in_features, to)
        return PackedWeight(format, offsets, (out_features, in_features), data, _float(bias))

    def pack_grouped(self, weight: GroupedWeight, bias: torch.Tensor | None = None) -> PackedWeight:
        """See ``pack_grouped``."""
        format = WeightFormat.Q4 if weight.bits == 4 else WeightFormat.Q8
        offsets = Offsets.NONE if weight.zeros is None else Offsets.ZEROS
        repeats = weight.group // GROUP
        codes, scales = weight.codes.contiguous(), weight.scales.repeat_interleave(repeats, 1)
        zeros = None if weight.zeros is None else weight.zeros.repeat_interleave(repeats, 1)
        data = self._room(format, offsets, *weight.shape)
        at = None if zeros is None else zeros.data_ptr()
        self._pack_codes(codes.data_ptr(), scales.data_ptr(), at, int(format), *weight.shape, data.data_ptr())
        return PackedWeight(format, offsets, weight.shape, data, _float(bias), weight.order)

    def pack_gguf(
        self, blocks: torch.Tensor, ggml_type: int, in_features: int, bias: torch.Tensor | None = None
    ) -> PackedWeight | None:
        """See ``pack_gguf``."""
        kind = _BLOCK_FORMATS.get(ggml_type)
        if kind is None:
            return None
        if in_features % kind.features:
            raise ModelLoadError(
                f"ggml type {ggml_type} needs in_features divisible by {kind.features}, got {in_features}"
            )
        shape = (blocks.shape[0], in_features)
        data = self._room(kind.format, kind.offsets, *shape)
        self._pack_gguf(blocks.contiguous().data_ptr(), ggml_type, *shape, data.data_ptr())
        return PackedWeight(kind.format, kind.offsets, shape, data, _float(bias))

    def _room(self, format: WeightFormat, offsets: Offsets, out_features: int, columns: int) -> torch.Tensor:
        return torch.zeros(self.packed_bytes(format, offsets, out_features, columns), dtype=torch.uint8)

    def unpack(self, weight: PackedWeight) -> torch.Tensor:
        """See ``unpack``."""
        out = torch.empty(weight.shape, dtype=torch.float32)
        self._unpack(WeightStruct.of(weight), out.data_ptr())
        return out

    def linear(self, x: torch.Tensor, parts: int, num_parts: int, y: torch.Tensor, *, accumulate: bool = False) -> None:
        """Multiply by the ``wr_weights`` at address ``parts``: y (+)= x · Wᵀ + b, float32, rows of unit stride."""
        self._linear(
            parts, num_parts, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), x.shape[0], int(accumulate)
        )


def packable_gguf(ggml_type: int) -> bool:
    """Whether blocks of this ggml type can be packed as they are."""
    return ggml_type in _BLOCK_FORMATS


def packed_bytes(format: WeightFormat, offsets: Offsets, out_features: int, columns: int) -> int:
    """Bytes that the panels of a packed weight [out_features, columns] take."""
    return _kernels().packed_bytes(format, offsets, out_features, columns)


def pack(
    weight: torch.Tensor, format: WeightFormat, bias: torch.Tensor | None = None, group: int = GROUP
) -> PackedWeight:
    """Pack a weight [out_features, in_features] of any float dtype, rounded or quantised.

    ``group`` input features (a multiple of 32) of a quantised weight get one scale. 8 bits lie around zero; with 4 bits
    scale and zero are those of many that have the least squared error. Raises ConfigError if 32 does not divide
    in_features.
    """
    return _kernels().pack(weight, format, bias, group)


def pack_grouped(weight: GroupedWeight, bias: torch.Tensor | None = None) -> PackedWeight:
    """Pack codes as they are: the weight's groups have a multiple of 32 columns."""
    return _kernels().pack_grouped(weight, bias)


def pack_gguf(
    blocks: torch.Tensor, ggml_type: int, in_features: int, bias: torch.Tensor | None = None
) -> PackedWeight | None:
    """Pack GGUF blocks uint8 [out_features, row bytes] without requantising; None for a type with no packed form.

    Raises ModelLoadError if the type's blocks do not divide in_features.
    """
    return _kernels().pack_gguf(blocks, ggml_type, in_features, bias)


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The packed values as float32 [out_features, columns]."""
    return _kernels().unpack(weight)


class NativeLinear(Linear):
    """Packed weights of one input, side by side."""

    def __init__(self, parts: tuple[PackedWeight, ...]) -> None:
        self.parts = parts
        self.struct = (WeightStruct * len(parts))(*map(WeightStruct.of, parts))
        """``wr_weights[len(parts)]``, pointing into ``parts``."""
        self.out_features = sum(part.shape[0] for part in parts)
        self.struct_bytes = torch.frombuffer(self.struct, dtype=torch.uint8)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.apply``."""
        return torch.ops.warmroot.linear(x.float(), self.struct_bytes, self.out_features).to(x.dtype)


@dataclass(frozen=True, slots=True)
class NativeMethod(LinearMethod):
    """Weights in one packed format, multiplied by the native kernels."""

    format: WeightFormat

    @staticmethod
    def is_available() -> bool:
        """True where the native library is."""
        return native() is not None

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
        """See ``LinearMethod.prepare``. Raises ConfigError if the format does not divide in_features."""
        return NativeLinear((pack(weight, self.format, bias),))


@lru_cache(maxsize=1)
def _kernels() -> LinearKernels:
    library = native()
    if library is None:
        raise ConfigError("packed weights need the native kernels, which are not built or are switched off")
    return LinearKernels(library)


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _register() -> None:
    """warmroot::linear: ``parts`` holds the bytes of ``wr_weights`` structures, whose memory the caller keeps."""
    torch.library.define("warmroot::linear", "(Tensor x, Tensor parts, int out_features) -> Tensor")
    size = ctypes.sizeof(WeightStruct)

    @torch.library.impl("warmroot::linear", "cpu")
    def linear(x: torch.Tensor, parts: torch.Tensor, out_features: int) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], out_features)
        _kernels().linear(x, parts.data_ptr(), parts.shape[0] // size, y)
        return y

    @torch.library.register_fake("warmroot::linear")
    def linear_fake(x: torch.Tensor, parts: torch.Tensor, out_features: int) -> torch.Tensor:
        return x.new_empty(x.shape[0], out_features)


if native() is not None:
    _register()
