"""Attention by the native kernels, which read the paged cache in place."""

from collections import deque
from typing import NamedTuple

import torch

from ...cluster.errors import ConfigError
from ..kernels.attention import AttentionPlan, PagedAttention, cache_structs
from ..kernels.library import NativeLibrary, native
from .float8 import is_float8, store
from .interface import AttentionMetadata, KvPages
from .kv_memory import KvMemory
from .native_float8 import Parts
from .torch_backend import move_tokens


class _Planned(NamedTuple):
    metadata: AttentionMetadata
    window: int | None
    plan: AttentionPlan


class NativeAttention:
    """For float32 queries on the CPU; pages are float32, float16, bfloat16 or quantised.
    Those of eight-bit floats are decoded for each call.

    A step's work is planned once per (metadata, window) and the plan kept for the step's other layers, so metadata
    must not change in place.
    """

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        """With the kernels of ``library``, this machine's by default. Raises ConfigError where there are none."""
        library = library or native()
        if library is None:
            raise ConfigError("native attention: the kernels were not built or are switched off", param="attention")
        self._functions = PagedAttention(library)
        self._float8 = Parts()
        self._plans: deque[_Planned] = deque(maxlen=16)
        """The last plans: at least one per KV group."""

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``AttentionBackend.page_shapes``. Keys are transposed: a dimension of all of them is one vector."""
        return (num_kv_heads, head_dim, block_size), (num_kv_heads, block_size, head_dim)

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
        self._functions.append(k_TKD, v_TKD, k_cache, v_cache, slot_mapping)

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
        """See ``AttentionBackend.forward``."""
        if is_float8(k_cache):
            out_THD = torch.empty_like(q_THD)
            for part in self._float8.of(metadata, window, k_cache):
                keys, values = part.pages(k_cache, v_cache)
                out_THD[part.rows] = self.forward(
                    q_THD[part.rows], keys, values, part.metadata, scale=scale, window=window, softcap=softcap
                )
            return out_THD
        plan = self._plan(metadata, window, k_cache, q_THD.shape[1])
        return self._functions.attend(q_THD, k_cache, v_cache, plan.handle, scale, softcap or 0.0)

    def move(
        self,
        keys: tuple[KvPages, ...],
        values: tuple[torch.Tensor, ...],
        sources: torch.Tensor,
        destinations: torch.Tensor,
    ) -> None:
        """See ``TreeBackend``."""
        if is_float8(keys[0]):
            return move_tokens((*keys, *values), sources, destinations)
        self._functions.move(cache_structs(keys, values), sources, destinations)

    def plan_for(self, metadata: AttentionMetadata, window: int | None, kv: KvMemory, num_heads: int) -> AttentionPlan:
        """What ``forward`` would do in any layer of that window. Kept for a few steps: use it in the one it is for."""
        return self._plan(metadata, window, kv.keys[0], num_heads)

    def _plan(self, metadata: AttentionMetadata, window: int | None, k_cache: KvPages, num_heads: int) -> AttentionPlan:
        for planned in reversed(self._plans):
            if planned.metadata is metadata and planned.window == window:
                return planned.plan
        _, num_kv_heads, head_dim, block_size = k_cache.shape
        plan = self._functions.plan(
            metadata.cu_seqlens_q,
            metadata.seqused_k,
            metadata.block_table,
            (num_kv_heads, head_dim, block_size),
            num_heads,
            window,
            metadata.tree_mask,
        )
        self._plans.append(_Planned(metadata, window, plan))
        return plan
