"""Multi-head latent attention over the paged cache: see ``MlaSpec``."""

from dataclasses import dataclass

import torch

from ...cluster.model_spec import MlaSpec
from ..attention.interface import AttentionMetadata, KvPages, LatentBackend
from ..kernels.by_head import multiply_by_head
from .linear import Linear
from .norm import RMSNorm
from .rotary import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSelfAttention:
    """Projects, rotates, stores and attends in the absorbed form.

    A plain key is W_UK · latent, so its product with a query is that of the latent with W_UKᵀ · query; and the values
    W_UV · latent can be made after the weighted sum instead of before. Keys and values of heads never exist.
    """

    down: Linear
    """[T, hidden] -> the query's latent, if there is one, and what is cached."""
    q_norm: RMSNorm | None
    """Of the query's latent."""
    queries: Linear
    """From the query's latent, or from x where there is none."""
    kv_norm: RMSNorm
    key_up: torch.Tensor
    """[num_heads, qk_nope_head_dim, kv_lora_rank]: W_UK"""
    value_up: torch.Tensor
    """[num_heads, kv_lora_rank, v_head_dim]: W_UVᵀ"""
    out: Linear
    mla: MlaSpec
    scale: float
    backend: LatentBackend

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        k_cache: KvPages,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; this step's latents are appended to the cache. There are no values to cache."""
        mla = self.mla
        compressed = self.down.apply(x)
        if self.q_norm is not None:
            x, compressed = self.q_norm(compressed[:, : mla.q_lora_rank]), compressed[:, mla.q_lora_rank :]
        q_THD = self.queries.apply(x).view(x.shape[0], len(self.key_up), -1)
        plain_THN, turned_THR = q_THD.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), -1)
        latent, shared_key = compressed.split((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        turned = rotate(self._halves(torch.cat((turned_THR, shared_key[:, None]), 1)), angles)
        assert isinstance(k_cache, torch.Tensor)  # latents are not quantised
        self.backend.append(torch.cat((self.kv_norm(latent), turned[:, -1]), -1), k_cache, metadata.slot_mapping)
        q_THE = torch.cat((multiply_by_head(plain_THN, self.key_up), turned[:, :-1]), -1)
        mixed = self.backend.forward(q_THE, k_cache, metadata, scale=self.scale, value_size=mla.kv_lora_rank)
        return self.out.apply(multiply_by_head(mixed, self.value_up).flatten(1))

    def _halves(self, x_TND: torch.Tensor) -> torch.Tensor:
        """Neighbours apart, as ``rotate`` wants them; scores do not depend on the order."""
        return x_TND.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.mla.rope_interleave else x_TND
