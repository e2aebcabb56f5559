"""The choice of tokens as torch operators: ``native/sample*.cpp``.

Both take float32 logits [R, vocab] on the CPU whose rows may lie apart, and are registered where the native library is.
What is drawn is defined in ``../runner/filters.py`` and ``../runner/draw.py``: the same tokens up to float rounding.
"""

from ctypes import c_int64, c_void_p

import torch

from .library import NativeLibrary, native


class Sampling:
    """The C functions, on CPU tensors."""

    def __init__(self, library: NativeLibrary) -> None:
        self._argmax = library.functions.wr_argmax
        self._sample = library.functions.wr_sample
        self._argmax.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p)
        self._sample.argtypes = (c_void_p, c_int64, c_int64, c_int64, *(c_void_p,) * 6)
        self._argmax.restype = None
        self._sample.restype = None

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [R] int64: the first of each row's largest; 0 for a row with NaN."""
        logits = _with_unit_stride(logits)
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
        self._argmax(logits.data_ptr(), logits.stride(0), *logits.shape, token_ids.data_ptr())
        return token_ids

    def sample_top_k_top_p(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids [R] int64, one draw per row; 0 for a row without a finite largest logit.

        Per row [R]: temperature float32 (0: the largest logit), top_k int32 (0: off), top_p float32 (1: off), min_p
        float32 (0: off), uniform float64 in [0, 1).
        """
        logits = _with_unit_stride(logits)
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
        # Held until the call returns: of another dtype or layout, they are copies.
        parameters = [
            temperature.to(torch.float32).contiguous(),
            top_k.to(torch.int32).contiguous(),
            top_p.to(torch.float32).contiguous(),
            min_p.to(torch.float32).contiguous(),
            uniform.to(torch.float64).contiguous(),
        ]
        addresses = [parameter.data_ptr() for parameter in parameters]
        self._sample(logits.data_ptr(), logits.stride(0), *logits.shape, *addresses, token_ids.data_ptr())
        return token_ids


def _with_unit_stride(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _register(sampling: Sampling) -> None:
    torch.library.define("warmroot::argmax", "(Tensor logits) -> Tensor")
    torch.library.define(
        "warmroot::sample_top_k_top_p",
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    )
    torch.library.impl("warmroot::argmax", "cpu", sampling.argmax)
    torch.library.impl("warmroot::sample_top_k_top_p", "cpu", sampling.sample_top_k_top_p)
    for name in ("warmroot::argmax", "warmroot::sample_top_k_top_p"):
        torch.library.register_fake(name, lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64))


if (_library := native()) is not None:
    _register(Sampling(_library))
