"""Attention by flash-attention's CUDA kernels, which read the paged cache in place (``vllm-flash-attn`` 2.6.2)."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from ...cluster.errors import ConfigError
from .float8 import Float8Attention, is_float8, store
from .interface import AttentionMetadata, KvPages
from .quantised import QuantisedAttention
from .quantised_keys import QuantisedKeys


class FlashAttention:
    """Tri Dao, "FlashAttention-2", 2023. Half precision only; block sizes are multiples of 16.

    Nothing here waits for the device, and a decode reads every length there: it can be recorded as a CUDA graph.
    """

    name = "flash"

    def __init__(self) -> None:
        try:
            self._kernels: Any = importlib.import_module("vllm_flash_attn")
        except ImportError as error:
            raise ConfigError(
                f"flash attention needs the 'gpu' extra (pip install 'warmroot[gpu]'): {error}", param="attention"
            ) from error
        self._quantised = QuantisedAttention()
        self._float8 = Float8Attention()

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``AttentionBackend.page_shapes``."""
        page = (block_size, num_kv_heads, head_dim)
        return page, page

    def append(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        k_cache: KvPages,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend.append``."""
        if is_float8(k_cache):
            store(k_TKD, k_cache, slot_mapping)
            return store(v_TKD, v_cache, slot_mapping)
        if isinstance(k_cache, QuantisedKeys):
            return self._quantised.append(k_TKD, v_TKD, k_cache, v_cache, slot_mapping)
        k_cache.view(-1, *k_cache.shape[2:])[slot_mapping] = k_TKD
        v_cache.view(-1, *v_cache.shape[2:])[slot_mapping] = v_TKD

    def forward(
        self,
        q_THD: torch.Tensor,
        k_cache: KvPages,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``. Quantised pages are read by plain torch."""
        if is_float8(k_cache):
            return self._float8.forward(q_THD, k_cache, v_cache, metadata, scale=scale, window=window, softcap=softcap)
        if isinstance(k_cache, QuantisedKeys):
            return self._quantised.forward(
                q_THD, k_cache, v_cache, metadata, scale=scale, window=window, softcap=softcap
            )
        out_THD = torch.empty_like(q_THD)
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            # Keys to the left of the query's own, and none to its right.
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
            "block_table": metadata.block_table,
        }
        if metadata.max_seqlen_q == 1:
            # The decode kernel splits long contexts over the device; the varlen kernel does not.
            self._kernels.flash_attn_with_kvcache(
                q_THD[:, None], k_cache, v_cache, cache_seqlens=metadata.seqused_k, out=out_THD[:, None], **options
            )
            return out_THD
        cu_seqlens_k = F.pad(metadata.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        self._kernels.flash_attn_varlen_func(
            q_THD,
            k_cache,
            v_cache,
            metadata.cu_seqlens_q,
            cu_seqlens_k,
            metadata.max_seqlen_q,
            metadata.max_seqlen_k,
            out=out_THD,
            **options,
        )
        return out_THD
