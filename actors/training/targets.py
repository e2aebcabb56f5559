"""What a draft should say, and how far it is from that."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .features import Features
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Targets:
    """What the model says of some places: tokens of the reduced vocabulary and their probabilities."""

    places: torch.Tensor
    """[R, TOP] int64, -1 for tokens that it lacks."""
    probs: torch.Tensor
    """[R, TOP] float32."""

    @classmethod
    def of(cls, features: Features, rows: torch.Tensor | slice, vocabulary: Vocabulary) -> "Targets":
        """Of some rows."""
        return cls(vocabulary.places[features.top_ids[rows].long()], features.top_probs[rows].float())

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of logits [R, W] with the model's distribution, in nats, the mean of all rows.

        Mass of tokens that are not there asks for nothing.
        """
        probs = self.probs.masked_fill(self.places < 0, 0.0)
        return cast(torch.Tensor, _CrossEntropy.apply(logits, self.places.clamp(min=0), probs))

    def agreement(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row: is the likeliest token the model's ([R] bool), and how often would a drawn one stand ([R])."""
        q = logits.float().softmax(1).gather(1, self.places.clamp(min=0)).masked_fill(self.places < 0, 0.0)
        return logits.argmax(1) == self.places[:, 0], torch.minimum(self.probs, q).sum(1)


class _CrossEntropy(torch.autograd.Function):
    """With targets that are few. The gradient, softmax less targets, is made in the memory of the softmax: with a
    vocabulary as wide as this, passes over such tensors take longer than the products before.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, places: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        log_q = F.log_softmax(logits, 1, dtype=torch.float32)
        ctx.save_for_backward(log_q, places, probs)
        ctx.dtype = logits.dtype
        return -(log_q.gather(1, places) * probs).sum() / max(1, len(logits))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (declared without the tensors' number)
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        log_q, places, probs = ctx.saved_tensors
        rest = log_q.exp_().mul_(probs.sum(1, keepdim=True)).scatter_add_(1, places, -probs)
        return rest.mul_(gradient / max(1, len(rest))).to(ctx.dtype), None, None
