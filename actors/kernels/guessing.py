"""One pass of a recurrent head as one native call: ``native/guess.cpp``."""

import ctypes
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p

import torch

from .library import NativeLibrary
from .linear import NativeLinear, WeightStruct

MOST_GUESSES = 32


class _HeadStruct(ctypes.Structure):
    """wr_guessing_head"""

    _fields_ = [
        ("up", POINTER(WeightStruct)),
        ("down", POINTER(WeightStruct)),
        ("output", POINTER(WeightStruct)),
        ("eps", c_float),
    ]


class GuessingHead:
    """Weights of one head, and the function of one library."""

    def __init__(self, library: NativeLibrary, up: NativeLinear, down: NativeLinear, output: NativeLinear) -> None:
        """``up`` [inner, 2 * hidden], ``down`` [hidden, inner] and ``output`` [W, hidden] are of one part each."""
        self._linears = (up, down, output)  # own the memory
        self._head = _HeadStruct(up.struct, down.struct, output.struct, torch.finfo(torch.float32).eps)
        self._size = output.out_features
        self._guess = library.functions.wr_guess
        self._guess.argtypes = (POINTER(_HeadStruct), c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p)
        self._guess.restype = None

    def __call__(
        self, state: torch.Tensor, came: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """State [B, hidden] behind the tokens whose embeddings [B, hidden] ``came``, and the likeliest ones to follow.

        (the new state, places among the W tokens [B, count], their log-probabilities), at most 32 of them.
        """
        count = min(count, self._size, MOST_GUESSES)
        state = state.float().clone(memory_format=torch.contiguous_format)
        came = came.float().contiguous()
        places = torch.empty(len(state), count, dtype=torch.int64)
        logprobs = torch.empty(len(state), count)
        self._guess(
            byref(self._head),
            state.data_ptr(),
            came.data_ptr(),
            len(state),
            count,
            places.data_ptr(),
            logprobs.data_ptr(),
        )
        return state, places, logprobs
