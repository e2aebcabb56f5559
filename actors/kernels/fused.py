"""A decoder's layers as one native call per step.

At one row a layer takes microseconds, and asking for its ten operations from Python takes longer than computing them.
The layers' own objects stay what they are: this only hands their weights to ``native/step.cpp`` together.

Ranks that share the layers take their sums in there too where the group is in shared memory; otherwise the call comes
back for every sum, which then is what takes the time.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_int32, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...cluster.model_spec import ModelSpec, RopeSpec
from ..attention.float8 import is_float8
from ..attention.interface import AttentionMetadata
from ..attention.kv_memory import KvMemory
from ..attention.native_backend import NativeAttention
from ..layers.attention import SelfAttention
from ..layers.linear import Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..parallel.collectives import Collectives
from ..parallel.shared_memory import SharedMemoryGroup
from .attention import cache_struct
from .library import native
from .linear import NativeLinear
from .structs import DecoderStruct, KvCacheStruct, LayerStruct, StepStruct
from .tuning import ChoosingLinear, LinearChoice

if TYPE_CHECKING:
    from ..models.decoder import DecoderLayer

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class _Bound(NamedTuple):
    """The layers with the pages of one KV memory."""

    kv: KvMemory
    open_pages: int
    """Where there are more now, they lie elsewhere."""
    decoder: DecoderStruct
    layers: ctypes.Array[LayerStruct]


class FusedStep:
    """Runs all layers over a batch. Made by ``of``; not thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence["DecoderLayer"],
        rotary: Mapping[RopeSpec, RotaryEmbedding],
        group: Collectives,
    ) -> None:
        library = native()
        assert library is not None
        self._forward = library.functions.wr_decoder_forward
        self._forward.argtypes = (POINTER(DecoderStruct), POINTER(StepStruct), c_void_p, c_int32, c_int32, c_void_p)
        self._forward.restype = c_int32
        self._spec = spec
        self._layers = layers
        self._rotary = tuple(rotary.values())
        self._ropes = {rope: index for index, rope in enumerate(rotary)}
        self._group = group
        first = layers[0].attention.out
        self._choice = first.choice if isinstance(first, ChoosingLinear) else LinearChoice()
        self._bound: _Bound | None = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layers: Sequence["DecoderLayer"],
        rotary: Mapping[RopeSpec, RotaryEmbedding],
        group: Collectives,
    ) -> "FusedStep | None":
        """For layers whose every part is native; None for others.

        ``group`` are the ranks that have the layers' other parts. What an output norm reads is summed in there or not
        at all, so families with such norms need a group of one or in shared memory.
        """
        is_native = all(map(_is_native, layers))
        can_sum = group.size == 1 or isinstance(group, SharedMemoryGroup) or not spec.sandwich_norms
        has_one_size = len({rope.rotary_dim for rope in rotary}) == 1
        return cls(spec, layers, rotary, group) if is_native and can_sum and has_one_size else None

    def suits(self, rows: int, kv: KvMemory) -> bool:
        """Whether the kernels read these pages, and it is the fastest way for a batch of so many tokens."""
        return self._choice.is_own(rows) and not is_float8(kv.keys[0])

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, kv: KvMemory, metadata: tuple[AttentionMetadata, ...]
    ) -> torch.Tensor:
        """[T, hidden] float32 -> the same tensor after all layers; keys and values are appended to ``kv``."""
        open_pages = 0 if kv.open is None else kv.open.num_pages
        if self._bound is None or self._bound.kv is not kv or self._bound.open_pages != open_pages:
            self._bound = self._bind(kv, open_pages)
        angles = [rotary.rows(positions) for rotary in self._rotary]
        backend = self._layers[0].attention.backend
        assert isinstance(backend, NativeAttention)
        plans = [
            backend.plan_for(entry, group.window, kv, self._spec.num_heads)
            for entry, group in zip(metadata, kv.layout.groups, strict=True)
        ]
        step = StepStruct(
            rows=x.shape[0],
            cos=_pointers([cos.data_ptr() for cos, _ in angles]),
            sin=_pointers([sin.data_ptr() for _, sin in angles]),
            plans=_pointers([plan.handle for plan in plans]),
            slots=_pointers([entry.slot_mapping.data_ptr() for entry in metadata]),
            adds_residual=int(self._group.rank == 0),
        )
        self._run(self._bound, step, x)
        return x

    def _run(self, bound: _Bound, step: StepStruct, x: torch.Tensor) -> None:
        halves, group = 2 * len(self._layers), self._group
        peer = c_int32()

        def run(first: int, end: int) -> int:
            return self._forward(byref(bound.decoder), byref(step), x.data_ptr(), first, end, byref(peer))

        if group.size == 1:
            run(0, halves)
        elif isinstance(group, SharedMemoryGroup):
            step.group = group.open_handle()
            group.settle(run(0, halves), peer, halves, x.nbytes)
        else:
            for half in range(halves):
                run(half, half + 1)
                group.all_reduce(x)

    def _bind(self, kv: KvMemory, open_pages: int) -> _Bound:
        spec = self._spec
        layers = (LayerStruct * len(self._layers))()
        for index, layer in enumerate(self._layers):
            group, slot = kv.layout.place(index)
            _fill(layers[index], layer, group, self._ropes[layer.rope], cache_struct(kv.keys[slot], kv.values[slot]))
        decoder = DecoderStruct(
            layers=ctypes.cast(layers, POINTER(LayerStruct)),
            num_layers=len(layers),
            hidden=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            inner=spec.intermediate_size,
            rotary_dim=next(iter(self._ropes)).rotary_dim,
            activation=_ACTIVATIONS[spec.activation],
            norm_eps=spec.norm_eps,
            scale=spec.query_scale,
            softcap=spec.attention_softcap or 0.0,
        )
        return _Bound(kv, open_pages, decoder, layers)


def _is_native(layer: "DecoderLayer") -> bool:
    attention, mlp = layer.attention, layer.mlp
    return (
        isinstance(attention, SelfAttention)
        and isinstance(attention.backend, NativeAttention)
        and isinstance(mlp, GatedMLP)
        and attention.qk_norm is None
        and attention.clip is None
        and all(_own(linear) is not None for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down))
    )


def _fill(struct: LayerStruct, layer: "DecoderLayer", group: int, rope: int, cache: KvCacheStruct) -> None:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, SelfAttention)
    assert isinstance(mlp, GatedMLP)
    struct.attention_norm = _weight(layer.attention_norm)
    struct.attention_output_norm = _weight(layer.attention_output_norm)
    struct.mlp_norm = _weight(layer.mlp_norm)
    struct.mlp_output_norm = _weight(layer.mlp_output_norm)
    struct.q_norm = _weight(attention.q_norm)
    struct.k_norm = _weight(attention.k_norm)
    struct.qkv, struct.num_qkv = _parts(attention.qkv)
    struct.out, _ = _parts(attention.out)
    struct.gate_up, struct.num_gate_up = _parts(mlp.gate_up)
    struct.down, _ = _parts(mlp.down)
    struct.group = group
    struct.rope = rope
    struct.cache = cache


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _own(linear: Linear) -> NativeLinear | None:
    if isinstance(linear, ChoosingLinear):
        return linear.own
    return linear if isinstance(linear, NativeLinear) else None


def _parts(linear: Linear) -> tuple[int, int]:
    own = _own(linear)
    assert own is not None
    return ctypes.addressof(own.struct), len(own.parts)


def _pointers(addresses: Sequence[int]) -> "ctypes._Pointer[c_void_p]":
    return ctypes.cast((c_void_p * len(addresses))(*addresses), POINTER(c_void_p))
