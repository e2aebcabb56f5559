"""The decoder of every model family: what differs between them is data in ``ModelSpec``."""

from copy import copy
from dataclasses import dataclass
from typing import cast

import torch

from ...cluster.model_spec import MLA_NORM_EPS, MlaSpec, ModelSpec, RopeSpec
from ...cluster.model_tensors import FINAL_NORM
from ..attention.interface import AttentionBackend, AttentionMetadata, KvPages, LatentBackend
from ..attention.kv_memory import KvMemory
from ..kernels.fused import FusedStep
from ..layers.attention import SelfAttention
from ..layers.embedding import Embedding, LogitGather
from ..layers.latent_attention import LatentSelfAttention
from ..layers.mlp import GatedMLP
from ..layers.moe import MoeMLP
from ..layers.moe_dispatch import LocalDispatch, TokenExchange
from ..layers.norm import QueryKeyNorm, RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..parallel.collectives import Collectives
from ..parallel.shard import Shard
from .linears import Linears
from .sparse import SparseBuilder
from .tensors import OUTPUT, layer_prefix, rank_spec
from .weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP with residual connections; the output norms are Gemma's.

    Ranks of a tensor-parallel ``group`` have parts of both; the sum of what they add is taken once after each.
    """

    attention_norm: RMSNorm
    attention: SelfAttention | LatentSelfAttention
    attention_output_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoeMLP
    mlp_output_norm: RMSNorm | None
    rope: RopeSpec
    group: Collectives

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        k_cache: KvPages,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; x is overwritten."""
        attended = self.attention(self.attention_norm(x), angles, k_cache, v_cache, metadata)
        x = self._add(x, attended, self.attention_output_norm)
        return self._add(x, self.mlp(self.mlp_norm(x)), self.mlp_output_norm)

    def _add(self, x: torch.Tensor, part: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        if norm is not None:
            self.group.all_reduce(part)
            return x.add_(norm(part))
        # The sum has the residual once: in the first rank's part.
        x = x.add_(part) if self.group.rank == 0 else part
        self.group.all_reduce(x)
        return x


class Decoder:
    """A loaded model, or a rank's share of it. ``dtype`` is that of activations.

    ``spec`` is the model as the rank computes it: only its layers, and of those its heads and MLP columns.
    """

    def __init__(
        self,
        shard: Shard,
        weights: Weights,
        linears: Linears,
        backend: AttentionBackend | LatentBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        own, group = shard.own, shard.groups.tp
        spec = rank_spec(own)
        self.spec = spec
        self.own = own
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.weights_format = linears.format
        self.table_dtype = linears.table.dtype
        self.embedding = Embedding(linears.table, spec.embedding_scale, dtype, group, own.cuts["vocab"].start)
        builder = _LayerBuilder(shard, spec, weights, linears, backend, dtype, device)
        self.layers = [builder.layer(index) for index in range(spec.num_layers)]
        self.rotary = {rope: RotaryEmbedding(rope, device) for rope in {layer.rope for layer in self.layers}}
        self.norm = builder.norm(FINAL_NORM) if own.has_head else None
        self.head = linears.linear(OUTPUT) if own.has_head else None
        self._join = LogitGather(spec.vocab_size, group)
        self._group = group
        self._fused = FusedStep.of(spec, self.layers, self.rotary, group)

    def first_layers(self, count: int) -> "Decoder":
        """A decoder that shares these weights and leaves out all layers but the first ``count``."""
        short = copy(self)
        short.layers = self.layers[:count]
        short._fused = FusedStep.of(self.spec, short.layers, self.rotary, self._group)
        return short

    def take_over(self, other: "Decoder") -> None:
        """Compute with the weights of another decoder of the same share of the same model from now on."""
        if other.own != self.own or (other.dtype, other.device) != (self.dtype, self.device):
            raise ValueError("the other decoder is not of the same model")
        self.weights_format, self.table_dtype = other.weights_format, other.table_dtype
        self.embedding, self.layers, self.rotary = other.embedding, other.layers, other.rotary
        self.norm, self.head, self._fused = other.norm, other.head, other._fused

    @property
    def sparse_mlps(self) -> dict[int, MoeMLP]:
        """Those of its layers with experts, by the layers' numbers in the model."""
        numbered = zip(self.own.layers, self.layers, strict=True)
        return {number: layer.mlp for number, layer in numbered if isinstance(layer.mlp, MoeMLP)}

    @property
    def kv_heads(self) -> int:
        """KV heads that the rank caches."""
        return self.spec.cache_heads

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        kv: KvMemory,
        metadata: tuple[AttentionMetadata, ...],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids and positions [T] int64 -> hidden states [T, hidden], after the final norm in the last stage.

        Later stages take the ``hidden`` states of the stage before, and overwrite them, instead of token ids.
        ``metadata`` has one entry per KV group; the keys and values of the T tokens are stored in ``kv``.
        """
        if hidden is None:
            if token_ids is None:
                raise ValueError("forward takes token ids or hidden states")
            hidden = self.embedding(token_ids)
        x = self._run(hidden, positions, kv, metadata)
        return x if self.norm is None else self.norm(x)

    def _run(
        self, x: torch.Tensor, positions: torch.Tensor, kv: KvMemory, metadata: tuple[AttentionMetadata, ...]
    ) -> torch.Tensor:
        """All layers; x is overwritten."""
        kv.prepare(metadata)
        if self._fused is not None and self._fused.suits(x.shape[0], kv):
            return self._fused(x, positions, kv, metadata)
        angles = {rope: rotary.angles(positions, self.dtype) for rope, rotary in self.rotary.items()}
        for index, layer in enumerate(self.layers):
            group, slot = kv.layout.place(index)
            x = layer(x, angles[layer.rope], kv.keys[slot], kv.values[slot], metadata[group])
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Hidden states [R, hidden] -> logits [R, vocab] float32 on the rank that samples, None on others of its group.

        All ranks of the last stage's group call it. Raises ValueError in other stages.
        """
        if self.head is None:
            raise ValueError("only the last stage has logits")
        logits = self.head.apply(hidden).float()
        softcap = self.spec.logit_softcap
        return self._join(logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap))


@dataclass(frozen=True, slots=True)
class _LayerBuilder:
    shard: Shard
    spec: ModelSpec
    weights: Weights
    linears: Linears
    backend: AttentionBackend | LatentBackend
    dtype: torch.dtype
    device: torch.device

    def layer(self, index: int) -> DecoderLayer:
        """By its place among the rank's layers."""
        spec, prefix = self.spec, layer_prefix(self.shard.own.layers[index])
        sandwich = spec.sandwich_norms
        after_attention = self.norm(prefix + "post_attention_layernorm.weight")
        return DecoderLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn.", spec.layer_windows[index]),
            attention_output_norm=after_attention if sandwich else None,
            mlp_norm=self.norm(prefix + "pre_feedforward_layernorm.weight") if sandwich else after_attention,
            mlp=self._mlp(self.shard.own.layers[index]),
            mlp_output_norm=self.norm(prefix + "post_feedforward_layernorm.weight") if sandwich else None,
            rope=spec.rope if spec.layer_windows[index] is None else spec.rope_sliding or spec.rope,
            group=self.shard.groups.tp,
        )

    def norm(self, name: str, eps: float | None = None) -> RMSNorm:
        """``eps``: the model's by default."""
        weight = self.weights.take(name).to(self.device)
        return RMSNorm(weight, self.spec.norm_eps if eps is None else eps, plus_one=self.spec.norm_plus_one)

    def _attention(self, prefix: str, window: int | None) -> SelfAttention | LatentSelfAttention:
        spec = self.spec
        if spec.mla is not None:
            return self._latent_attention(prefix, spec.mla)
        by_head = spec.qk_norm and not spec.qk_norm_whole
        return SelfAttention(
            qkv=self.linears.linear(prefix + "qkv_proj"),
            out=self.linears.linear(prefix + "o_proj"),
            q_norm=self.norm(prefix + "q_norm.weight") if by_head else None,
            k_norm=self.norm(prefix + "k_norm.weight") if by_head else None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.query_scale,
            window=window,
            softcap=spec.attention_softcap,
            backend=cast(AttentionBackend, self.backend),
            qk_norm=self._qk_norm(prefix) if spec.qk_norm_whole else None,
            clip=spec.qkv_clip,
        )

    def _latent_attention(self, prefix: str, mla: MlaSpec) -> LatentSelfAttention:
        up = self.weights.take(prefix + "kv_b_proj.weight").to(self.device, self.dtype)
        key_up, value_up = up.view(self.spec.num_heads, -1, mla.kv_lora_rank).split(
            (mla.qk_nope_head_dim, mla.v_head_dim), 1
        )
        has_query_latent = mla.q_lora_rank is not None
        return LatentSelfAttention(
            down=self.linears.linear(prefix + "down_proj"),
            q_norm=self.norm(prefix + "q_a_layernorm.weight", MLA_NORM_EPS) if has_query_latent else None,
            queries=self.linears.linear(prefix + "queries_proj"),
            kv_norm=self.norm(prefix + "kv_a_layernorm.weight", MLA_NORM_EPS),
            key_up=key_up.contiguous(),
            value_up=value_up.transpose(1, 2).contiguous(),
            out=self.linears.linear(prefix + "o_proj"),
            mla=mla,
            scale=self.spec.query_scale,
            backend=cast(LatentBackend, self.backend),
        )

    def _qk_norm(self, prefix: str) -> QueryKeyNorm:
        own = self.shard.own
        queries, keys = (self.weights.take(f"{prefix}{part}_norm.weight").to(self.device) for part in "qk")
        return QueryKeyNorm(
            queries,
            keys,
            own.spec.norm_eps,
            sizes=(own.spec.num_heads * own.spec.head_dim, own.spec.num_kv_heads * own.spec.head_dim),
            kv_ranks=own.heads.kv_ranks,
            group=self.shard.groups.tp,
        )

    def _mlp(self, layer: int) -> GatedMLP | MoeMLP:
        """Of a layer of the whole model."""
        if self.shard.own.spec.is_sparse(layer):
            return self._sparse().mlp(layer)
        prefix = layer_prefix(layer) + "mlp."
        return GatedMLP(
            self.linears.linear(prefix + "gate_up_proj"),
            self.linears.linear(prefix + "down_proj"),
            self.spec.activation,
        )

    def _sparse(self) -> SparseBuilder:
        layout, groups, own = self.shard.layout, self.shard.groups, self.shard.own
        assert own.spec.moe is not None
        assert layout.placement is not None
        exchanges = layout.topology.exchanges_tokens
        return SparseBuilder(
            spec=own.spec,
            moe=own.spec.moe,
            weights=self.weights,
            linears=self.linears,
            placement=layout.placement,
            ep_rank=own.place.ep_rank,
            dispatch=TokenExchange(groups.ep, tp=layout.topology.tp) if exchanges else LocalDispatch(),
            device=self.device,
        )
