"""Root mean square norms (Zhang and Sennrich, 2019)."""

import torch

from ..kernels.pointwise import is_native_input
from ..parallel.collectives import Collectives


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 inside.

    ``plus_one`` is for checkpoints that store the weight minus one (Gemma).
    """

    def __init__(self, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> None:
        size = weight.shape[-1]
        self.weight = (weight.float() + 1.0 if plus_one else weight.float()).contiguous()
        """[size] float32, ready to multiply with."""
        self._eps = eps
        self._is_native = is_native_input(self.weight)
        # sqrt(mean(x²) + eps) = hypot(|x|, sqrt(size · eps)) / sqrt(size): two kernels where the formula takes five.
        self._scaled = self.weight * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape and dtype."""
        if self._is_native and x.dtype == torch.float32:
            return torch.ops.warmroot.rms_norm.default(x, self.weight, self._eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(length.hypot_(self._floor)).mul_(self._scaled).to(x.dtype)


class QueryKeyNorm:
    """One norm of all heads' queries and one of all heads' keys (OLMoE).

    Ranks of a ``group`` have parts of both vectors, which are ``sizes`` long; each key is on ``kv_ranks`` of them.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        eps: float,
        *,
        sizes: tuple[int, int],
        kv_ranks: int,
        group: Collectives,
    ) -> None:
        """``queries`` and ``keys`` are the rank's parts of the norms' weights."""
        self._weights = (queries.float(), keys.float())
        self._counted = torch.tensor([1.0, 1.0 / kv_ranks], device=queries.device)
        self._sizes = torch.tensor(sizes, device=queries.device)
        self._eps = eps
        self._group = group

    def __call__(self, qkv: torch.Tensor) -> None:
        """[T, queries + keys + values], in place."""
        queries, keys = (len(weight) for weight in self._weights)
        parts = (qkv[:, :queries], qkv[:, queries : queries + keys])
        squares = torch.stack([part.float().square().sum(1) for part in parts], 1) * self._counted
        self._group.all_reduce(squares)
        scales = (squares / self._sizes + self._eps).rsqrt_()
        for part, weight, scale in zip(parts, self._weights, scales.unbind(1), strict=True):
            part.copy_(part.float() * scale.unsqueeze(1) * weight)
