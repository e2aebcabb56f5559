"""Norm, gated activation and rotary embedding as torch operators: ``native/{rms_norm,gated,rotary}.cpp``.

The operators exist where the native library does; ``is_native_input`` says which tensors they take.
"""

from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from .library import NativeLibrary, native

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def is_native_input(x: torch.Tensor) -> bool:
    """Whether the operators of this module take x: float32 on the CPU, with a library to run them."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and native() is not None


class Pointwise:
    """The C functions, on float32 CPU tensors."""

    def __init__(self, library: NativeLibrary) -> None:
        functions = library.functions
        self._rms_norm = functions.wr_rms_norm
        self._gated = functions.wr_gated
        self._rotary = functions.wr_rotary
        self._rms_norm.argtypes = (
            *(c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64),
            *(c_int64, c_int64, c_int32),
        )
        self._gated.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int64)
        self._rotary.argtypes = (
            *(c_void_p, c_int64, c_int64, c_int32, c_int32, c_int32),
            *(c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int32),
        )
        for function in (self._rms_norm, self._gated, self._rotary):
            function.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Rows of x [..., size] / sqrt(mean(x²) + eps) · weight [size], in a new tensor. A 2-d x may be strided."""
        size = weight.shape[0]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        self._rms_norm(
            rows.data_ptr(), rows.stride(0), weight.data_ptr(), eps, out.data_ptr(), size, rows.shape[0], size, 0
        )
        return out

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """gate_up [T, 2 · inner], gate first -> activation(gate) · up [T, inner]."""
        gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, inner, dtype=torch.float32)
        self._gated(gate_up.data_ptr(), gate_up.stride(0), rows, inner, _ACTIVATIONS[activation], out.data_ptr(), inner)
        return out

    def rotary(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate qk [T, N, D] in place by cos and sin [T, rotary_dim / 2]; heads lie side by side, tokens may not."""
        cos, sin = cos.contiguous(), sin.contiguous()
        rows, heads, head_dim = qk.shape
        self._rotary(
            *(qk.data_ptr(), qk.stride(0), rows, heads, 0, head_dim),
            *(None, None, 0.0, cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1]),
        )


def _register(pointwise: Pointwise) -> None:
    torch.library.define("warmroot::rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor")
    torch.library.define("warmroot::gated", "(Tensor gate_up, str activation) -> Tensor")
    torch.library.define("warmroot::rotary", "(Tensor(a!) qk, Tensor cos, Tensor sin) -> ()")
    torch.library.impl("warmroot::rms_norm", "cpu", pointwise.rms_norm)
    torch.library.impl("warmroot::gated", "cpu", pointwise.gated)
    torch.library.impl("warmroot::rotary", "cpu", pointwise.rotary)
    torch.library.register_fake("warmroot::rms_norm", lambda x, weight, eps: torch.empty_like(x).contiguous())
    torch.library.register_fake(
        "warmroot::gated", lambda gate_up, activation: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    )
    torch.library.register_fake("warmroot::rotary", lambda qk, cos, sin: None)


if (_library := native()) is not None:
    _register(Pointwise(_library))
