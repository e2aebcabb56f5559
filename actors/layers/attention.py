"""The self-attention block over the paged cache."""

from dataclasses import dataclass

import torch

from ..attention.interface import AttentionBackend, AttentionMetadata
from .linear import Linear
from .norm import RMSNorm
from .rotary import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Projects, rotates, stores and attends, with q, k and v as one linear."""

    qkv: Linear
    out: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    backend: AttentionBackend

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; this step's keys and values are appended to the cache."""
        num_qk = self.num_heads + self.num_kv_heads
        qkv = self.qkv.apply(x).view(x.shape[0], num_qk + self.num_kv_heads, self.head_dim)
        qk = qkv[:, :num_qk]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), 1)
        qk = rotate(qk, angles)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        self.backend.append(k, qkv[:, num_qk:], k_cache, v_cache, metadata.slot_mapping)
        mixed = self.backend.forward(
            q, k_cache, v_cache, metadata, scale=self.scale, window=self.window, softcap=self.softcap
        )
        return self.out.apply(mixed.reshape(x.shape[0], -1))
