"""Which experts a token goes to, and how much each of them counts: see ``MoeSpec`` for the rules."""

from dataclasses import dataclass

import torch

from ...cluster.model_spec import MoeSpec
from .linear import Linear

_TINY = 1e-20
"""DeepSeek-V3 adds it to the sum of weights. Softmax scores never feel it."""


@dataclass(frozen=True, slots=True)
class Router:
    """The gate and the choice of every family, in float32.

    ``gate`` [num_experts, hidden] should be kept in float32: a rounded score may choose another expert.
    ``correction`` [num_experts] float32 steers the choice without changing the weights (DeepSeek-V3).
    """

    moe: MoeSpec
    gate: Linear
    correction: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> experts [T, k] int64, all different, and their weights [T, k] float32; the best come first."""
        logits = self.gate.apply(x.float())
        scores = logits.softmax(-1) if self.moe.scoring == "softmax" else steady_sigmoid(logits)
        wanted = scores if self.correction is None else scores + self.correction
        if self.moe.n_group > 1:
            wanted = self._only_best_groups(wanted)
        experts = wanted.topk(self.moe.experts_per_token).indices
        weights = scores.gather(1, experts)
        if self.moe.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return experts, weights * self.moe.routed_scaling_factor

    def _only_best_groups(self, wanted: torch.Tensor) -> torch.Tensor:
        """-inf for the experts of all but the best ``topk_group`` groups."""
        grouped = wanted.unflatten(-1, (self.moe.n_group, -1))
        counted = 1 if self.moe.scoring == "softmax" else min(2, grouped.shape[-1])
        best = grouped.topk(counted).values.sum(-1).topk(self.moe.topk_group).indices
        out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(out[..., None], -torch.inf).flatten(1)


def steady_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid of float32, the same wherever a value stands.

    Torch's float32 one differs in the last bit between the values that fill its vectors and those that remain.
    """
    return x.double().sigmoid_().float()
