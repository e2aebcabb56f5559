"""Root mean square norm (Zhang and Sennrich, 2019)."""

import torch

from ..kernels.pointwise import is_native_input


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
