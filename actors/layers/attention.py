"""The self-attention block over the paged cache."""

from dataclasses import dataclass

import torch

from ..attention.interface import AttentionBackend, AttentionMetadata, KvPages
from .linear import Linear
from .norm import QueryKeyNorm, RMSNorm
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
    qk_norm: QueryKeyNorm | None = None
    """Over all heads, where ``q_norm`` and ``k_norm`` are those of single heads."""
    clip: float | None = None
    """Bound of queries, keys and values before rotation."""

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        k_cache: KvPages,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; this step's keys and values are appended to the cache."""
        num_qk = self.num_heads + self.num_kv_heads
        flat = self.qkv.apply(x)
        if self.qk_norm is not None:
            self.qk_norm(flat)
        if self.clip is not None:
            flat.clamp_(-self.clip, self.clip)
        qkv = flat.view(x.shape[0], num_qk + self.num_kv_heads, self.head_dim)
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
