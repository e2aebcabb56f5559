"""Paged attention as torch operators: ``native/{attention_plan,paged_attention,kv_append,kv_move}.cpp``.

The operators exist where the native library does. Pages of keys are [num_kv_heads, head_dim, block_size], those of
values [num_kv_heads, block_size, head_dim], float32, float16 or bfloat16. Latents are keys and values of all heads at
once: their pages are [block_size, size]. Quantised pages are bytes (``native/kv_quantised.h``).
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from ..attention.quantised_keys import QuantisedKeys
from .library import NativeLibrary, native
from .structs import KvCacheStruct

PAGE_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""wr_format of the pages' elements."""
_QUANTISED = {"int8": 5, "int4": 6, "k8v4": 7}
"""wr_format of quantised pages."""


class SequencesStruct(ctypes.Structure):
    """wr_sequences"""

    _fields_ = [
        ("num_seqs", c_int32),
        ("cu_seqlens_q", c_void_p),
        ("seqused_k", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("tree_mask", c_void_p),
    ]


class AttentionPlan:
    """A step's work, cut into items for the threads. Valid while the block table does not change."""

    __slots__ = ("_block_table", "_free", "handle")

    def __init__(self, functions: "PagedAttention", block_table: torch.Tensor, handle: int) -> None:
        self.handle = handle
        """wr_attention_plan *"""
        self._block_table = block_table  # the plan points into it
        self._free = functions.free_plan

    def __del__(self) -> None:
        self._free(self.handle)


class PagedAttention:
    """The C functions, on CPU tensors."""

    def __init__(self, library: NativeLibrary) -> None:
        functions = library.functions
        self._plan = functions.wr_plan_attention
        self._plan.argtypes = (c_void_p, *[c_int32] * 5)
        self._plan.restype = c_void_p
        self.free_plan = functions.wr_free_attention_plan
        self.free_plan.argtypes = (c_void_p,)
        self.free_plan.restype = None
        self._append = functions.wr_kv_append
        self._append.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        self._append.restype = None
        self._move = functions.wr_kv_move
        self._move.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64)
        self._move.restype = None
        self._attend = functions.wr_paged_attention
        self._attend.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float, c_void_p, c_int64)
        self._attend.restype = None

    def plan(
        self,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        page: tuple[int, int, int],
        num_heads: int,
        window: int | None,
        tree_mask: torch.Tensor | None = None,
    ) -> AttentionPlan:
        """For arrays as in ``AttentionMetadata``; ``page`` is the shape of a page of keys."""
        num_kv_heads, head_dim, block_size = page
        table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        sequences = SequencesStruct(
            num_seqs=seqused_k.shape[0],
            cu_seqlens_q=cu_seqlens_q.data_ptr(),
            seqused_k=seqused_k.data_ptr(),
            block_table=table.data_ptr(),
            table_stride=table.stride(0),
            tree_mask=None if tree_mask is None else tree_mask.data_ptr(),
        )
        handle = self._plan(ctypes.byref(sequences), num_heads, num_kv_heads, head_dim, block_size, window or 0)
        return AttentionPlan(self, table, handle)

    def append(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        k_pages: torch.Tensor | QuantisedKeys,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store float32 keys and values at slots [T] int64, block * block_size + offset."""
        if k_TKD.stride(0) != v_TKD.stride(0) or not (_has_packed_heads(k_TKD) and _has_packed_heads(v_TKD)):
            k_TKD, v_TKD = k_TKD.contiguous(), v_TKD.contiguous()
        cache = cache_struct(k_pages, v_pages)
        self._append(
            *(k_TKD.data_ptr(), v_TKD.data_ptr(), k_TKD.stride(0), k_TKD.shape[0]),
            *(ctypes.byref(cache), slots.data_ptr()),
        )

    def attend(
        self,
        q_THD: torch.Tensor,
        k_pages: torch.Tensor | QuantisedKeys,
        v_pages: torch.Tensor,
        plan: int,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """float32 [T, num_heads, head_dim] -> the same shape. ``plan``: an AttentionPlan's handle; softcap 0: none."""
        return self._attend_to(q_THD, cache_struct(k_pages, v_pages), plan, scale, softcap)

    def move(self, caches: "ctypes.Array[KvCacheStruct]", sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy tokens from slots [N] int64 to slots [N], one after the other, in caches that are not quantised."""
        self._move(caches, len(caches), sources.data_ptr(), destinations.data_ptr(), len(sources))

    def append_latents(self, latents_TE: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Store float32 latents at slots [T] int64, block * block_size + offset."""
        latents_TE = latents_TE.contiguous()
        rows, size = latents_TE.shape
        cache = _latent_struct(pages)
        self._append(None, latents_TE.data_ptr(), size, rows, ctypes.byref(cache), slots.data_ptr())

    def attend_to_latents(self, q_THE: torch.Tensor, pages: torch.Tensor, plan: int, scale: float) -> torch.Tensor:
        """As ``attend``, of queries as wide as the latents; so is the result."""
        return self._attend_to(q_THE, _latent_struct(pages), plan, scale, 0.0)

    def _attend_to(
        self, q_THD: torch.Tensor, cache: KvCacheStruct, plan: int, scale: float, softcap: float
    ) -> torch.Tensor:
        q_THD = q_THD if _has_packed_heads(q_THD) else q_THD.contiguous()
        out = torch.empty(q_THD.shape, dtype=torch.float32)
        self._attend(
            *(plan, q_THD.data_ptr(), q_THD.stride(0), ctypes.byref(cache)),
            *(scale, softcap, out.data_ptr(), out.stride(0)),
        )
        return out


def _has_packed_heads(x_THD: torch.Tensor) -> bool:
    """Heads lie side by side; tokens may not."""
    return x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]


def cache_structs(
    keys: Sequence[torch.Tensor | QuantisedKeys], values: Sequence[torch.Tensor]
) -> "ctypes.Array[KvCacheStruct]":
    """Several layers' pages, or latents, which have none of values."""
    return (KvCacheStruct * len(keys))(
        *(
            _latent_struct(k) if isinstance(k, torch.Tensor) and not v.numel() else cache_struct(k, v)
            for k, v in zip(keys, values, strict=True)
        )
    )


def cache_struct(k_pages: torch.Tensor | QuantisedKeys, v_pages: torch.Tensor) -> KvCacheStruct:
    """One layer's pages as the C functions take them. Points into the tensors, which the caller keeps."""
    _, num_kv_heads, head_dim, block_size = k_pages.shape
    if isinstance(k_pages, QuantisedKeys):
        return KvCacheStruct(
            keys=k_pages.pages.data_ptr(),
            values=v_pages.data_ptr(),
            format=_QUANTISED[k_pages.codec.format.name],
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            open_keys=k_pages.open_pages.data_ptr(),
            open_pages=k_pages.open.table.data_ptr(),
        )
    return KvCacheStruct(
        keys=k_pages.data_ptr(),
        values=v_pages.data_ptr(),
        format=PAGE_FORMATS[k_pages.dtype],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _latent_struct(pages: torch.Tensor) -> KvCacheStruct:
    """Of pages [num_blocks, block_size, size]."""
    return KvCacheStruct(
        keys=None,
        values=pages.data_ptr(),
        format=PAGE_FORMATS[pages.dtype],
        block_size=pages.shape[1],
        num_kv_heads=1,
        head_dim=pages.shape[2],
    )


def _register(attention: PagedAttention) -> None:
    torch.library.define(
        "warmroot::kv_append",
        "(Tensor keys, Tensor values, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slots) -> ()",
    )
    torch.library.define(
        "warmroot::paged_attention",
        "(Tensor queries, Tensor key_pages, Tensor value_pages, int plan, float scale, float softcap) -> Tensor",
    )
    torch.library.impl("warmroot::kv_append", "cpu", attention.append)
    torch.library.impl("warmroot::paged_attention", "cpu", attention.attend)
    torch.library.register_fake("warmroot::kv_append", lambda keys, values, key_pages, value_pages, slots: None)
    torch.library.register_fake(
        "warmroot::paged_attention",
        lambda queries, key_pages, value_pages, plan, scale, softcap: queries.new_empty(queries.shape),
    )


if (_library := native()) is not None:
    _register(PagedAttention(_library))
