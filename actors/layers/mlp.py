"""The gated feed-forward block."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from ..kernels.pointwise import is_native_input
from .linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) · up(x)) with gate and up as one linear."""

    gate_up: Linear
    down: Linear
    activation: Literal["silu", "gelu_tanh"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down.apply(_gate(self.gate_up.apply(x), self.activation))


def _gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if is_native_input(gate_up):
        return torch.ops.warmroot.gated.default(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate.mul_(up)
