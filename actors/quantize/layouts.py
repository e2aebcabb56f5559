"""Codes packed into int32 words as published checkpoints hold them: AutoGPTQ's layout (v1) and AutoAWQ's (GEMM)."""

import torch

from .quantised import QuantisedLinear

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each nibble of a word holds, from the lowest on."""


def gptq_tensors(linear: QuantisedLinear, bits: int) -> dict[str, torch.Tensor]:
    """By the last part of their names: qweight [in / pack, out], qzeros [groups, out / pack], scales, g_idx.

    Zero points are stored less one; scales are [groups, out] float16, g_idx [in] is the group of each input.
    """
    zeros = linear.grid.zeros.t().to(torch.int64) - 1
    return {
        "qweight": _packed(linear.codes.t(), bits, dim=0),
        "qzeros": _packed(zeros, bits, dim=1),
        "scales": linear.grid.scales.t().half().contiguous(),
        "g_idx": linear.groups.to(torch.int32),
    }


def awq_tensors(linear: QuantisedLinear) -> dict[str, torch.Tensor]:
    """By the last part of their names: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    return {
        "qweight": _packed(_interleaved(linear.codes.t()), 4, dim=1),
        "qzeros": _packed(_interleaved(linear.grid.zeros.t()), 4, dim=1),
        "scales": linear.grid.scales.t().half().contiguous(),
    }


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    return codes.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)


def _packed(codes: torch.Tensor, bits: int, *, dim: int) -> torch.Tensor:
    """Codes along ``dim`` into words of int32, the first in the lowest bits."""
    per_word = 32 // bits
    words = codes.to(torch.int64).unflatten(dim, (-1, per_word)).movedim(dim + 1, -1)
    shifted = words << torch.arange(0, 32, bits)
    summed = shifted.sum(-1)
    return (summed - ((summed >> 31) << 32)).to(torch.int32).contiguous()
