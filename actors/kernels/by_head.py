"""Products by a matrix of each head: ``native/by_head.cpp`` as a torch operator where the library is, else torch's."""

from ctypes import c_int32, c_int64, c_void_p

import torch

from .library import NativeLibrary, native
from .pointwise import is_native_input


def multiply_by_head(x_THI: torch.Tensor, weights_HIO: torch.Tensor) -> torch.Tensor:
    """[T, H, I] · [H, I, O], the weights contiguous -> [T, H, O], each head by its own matrix."""
    if is_native_input(x_THI):
        return torch.ops.warmroot.by_head.default(x_THI, weights_HIO)
    return torch.bmm(x_THI.transpose(0, 1), weights_HIO).transpose(0, 1)


class ByHead:
    """The C function, on float32 CPU tensors."""

    def __init__(self, library: NativeLibrary) -> None:
        self._multiply = library.functions.wr_by_head
        self._multiply.argtypes = (
            *(c_void_p, c_int64, c_int64, c_void_p, c_void_p),
            *(c_int64, c_int32, c_int32, c_int32),
        )
        self._multiply.restype = None

    def __call__(self, x_THI: torch.Tensor, weights_HIO: torch.Tensor) -> torch.Tensor:
        """See ``multiply_by_head``."""
        x_THI = x_THI if x_THI.stride(2) == 1 else x_THI.contiguous()
        rows, heads, inner = x_THI.shape
        outer = weights_HIO.shape[2]
        out = torch.empty(rows, heads, outer, dtype=torch.float32)
        self._multiply(
            *(x_THI.data_ptr(), x_THI.stride(0), x_THI.stride(1), weights_HIO.data_ptr(), out.data_ptr()),
            *(rows, heads, inner, outer),
        )
        return out


def _register(by_head: ByHead) -> None:
    torch.library.define("warmroot::by_head", "(Tensor x, Tensor weights) -> Tensor")
    torch.library.impl("warmroot::by_head", "cpu", by_head.__call__)
    torch.library.register_fake(
        "warmroot::by_head", lambda x, weights: x.new_empty(x.shape[0], x.shape[1], weights.shape[2])
    )


if (_library := native()) is not None:
    _register(ByHead(_library))
