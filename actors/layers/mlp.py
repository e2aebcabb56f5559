"""The gated feed-forward block."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from .linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) · up(x)) with gate and up as one linear."""

    gate_up: Linear
    down: Linear
    activation: Literal["silu", "gelu_tanh"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up.apply(x).chunk(2, -1)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down.apply(gate.mul_(up))
