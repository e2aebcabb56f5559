"""Linear layers behind one seam: a method prepares weights once, the layer it returns applies them.

Sharding and quantised weights come as further methods; the layers that call them do not change.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """y = x · Wᵀ + b."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], in x's dtype."""
        ...


class LinearMethod(Protocol):
    """How weights are stored and multiplied."""

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Take ownership of a weight [out_features, in_features] of any float dtype."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights as they are."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.apply``."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DenseMethod:
    """Weights in one dtype, multiplied by torch."""

    dtype: torch.dtype
    device: torch.device

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.prepare``."""
        return DenseLinear(
            weight.to(self.device, self.dtype).contiguous(),
            None if bias is None else bias.to(self.device, self.dtype),
        )


@dataclass(frozen=True, slots=True)
class PackedHalfLinear:
    """float16 weights in FBGEMM's panels, float32 activations and sums."""

    packed: Any

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.apply``."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class PackedHalfMethod:
    """float16 weights on x86: reads half the bytes of float32 and rounds nothing else."""

    @staticmethod
    def is_available() -> bool:
        """True where torch was built with FBGEMM."""
        return "fbgemm" in torch.backends.quantized.supported_engines

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod.prepare``."""
        packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        return PackedHalfLinear(packed)
