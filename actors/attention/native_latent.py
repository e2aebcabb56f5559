"""Attention over cached latents by the native kernels, which read the pages in place."""

from collections import deque
from typing import NamedTuple

import torch

from ...cluster.errors import ConfigError
from ..kernels.attention import AttentionPlan, PagedAttention, cache_structs
from ..kernels.library import NativeLibrary, native
from .interface import AttentionMetadata, KvPages


class _Planned(NamedTuple):
    metadata: AttentionMetadata
    plan: AttentionPlan


class NativeLatentAttention:
    """For float32 queries on the CPU; pages are float32, float16 or bfloat16. Metadata must not change in place."""

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        """With the kernels of ``library``, this machine's by default. Raises ConfigError where there are none."""
        library = library or native()
        if library is None:
            raise ConfigError("native attention: the kernels were not built or are switched off", param="attention")
        self._functions = PagedAttention(library)
        self._plans: deque[_Planned] = deque(maxlen=4)
        """Of the last steps, for their other layers."""

    def page_shapes(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``PagedBackend.page_shapes``."""
        return (block_size, num_kv_heads * head_dim), (block_size, 0)

    def append(self, entry_TE: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See ``LatentBackend.append``."""
        self._functions.append_latents(entry_TE, cache, slot_mapping)

    def forward(
        self, q_THE: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float, value_size: int
    ) -> torch.Tensor:
        """See ``LatentBackend.forward``."""
        plan = self._plan(metadata, cache, q_THE.shape[1])
        return self._functions.attend_to_latents(q_THE, cache, plan.handle, scale)[..., :value_size]

    def move(
        self,
        keys: tuple[KvPages, ...],
        values: tuple[torch.Tensor, ...],
        sources: torch.Tensor,
        destinations: torch.Tensor,
    ) -> None:
        """See ``TreeBackend``."""
        self._functions.move(cache_structs(keys, values), sources, destinations)

    def _plan(self, metadata: AttentionMetadata, cache: torch.Tensor, num_heads: int) -> AttentionPlan:
        for planned in reversed(self._plans):
            if planned.metadata is metadata:
                return planned.plan
        _, block_size, size = cache.shape
        plan = self._functions.plan(
            metadata.cu_seqlens_q,
            metadata.seqused_k,
            metadata.block_table,
            (1, size, block_size),
            num_heads,
            None,
            metadata.tree_mask,
        )
        self._plans.append(_Planned(metadata, plan))
        return plan
