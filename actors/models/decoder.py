"""The decoder of every model family: what differs between them is data in ``ModelSpec``."""

from dataclasses import dataclass

import torch

from ...cluster.model_spec import ModelSpec, RopeSpec
from ..attention.interface import AttentionBackend, AttentionMetadata
from ..attention.kv_memory import KvMemory
from ..kernels.fused import FusedStep
from ..layers.attention import SelfAttention
from ..layers.embedding import Embedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from .linears import Linears
from .tensors import FINAL_NORM, OUTPUT, layer_prefix
from .weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP with residual connections; the output norms are Gemma's."""

    attention_norm: RMSNorm
    attention: SelfAttention
    attention_output_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP
    mlp_output_norm: RMSNorm | None
    rope: RopeSpec

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], in place."""
        mixed = self.attention(self.attention_norm(x), angles, k_cache, v_cache, metadata)
        x += mixed if self.attention_output_norm is None else self.attention_output_norm(mixed)
        fed = self.mlp(self.mlp_norm(x))
        x += fed if self.mlp_output_norm is None else self.mlp_output_norm(fed)
        return x


class Decoder:
    """A loaded model. ``dtype`` is that of activations; ``linears`` say in what form the weights are."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        linears: Linears,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.weights_format = linears.format
        self.table_dtype = linears.table.dtype
        self.embedding = Embedding(linears.table, spec.embedding_scale, dtype)
        builder = _LayerBuilder(spec, weights, linears, backend, device)
        self.layers = [builder.layer(index) for index in range(spec.num_layers)]
        self.rotary = {rope: RotaryEmbedding(rope, device) for rope in {layer.rope for layer in self.layers}}
        self.norm = builder.norm(FINAL_NORM)
        self.head = linears.linear(OUTPUT)
        self._fused = FusedStep.of(spec, self.layers, self.rotary)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvMemory,
        metadata: tuple[AttentionMetadata, ...],
    ) -> torch.Tensor:
        """Token ids and positions [T] int64 -> hidden states [T, hidden] after the final norm.

        ``metadata`` has one entry per KV group; the keys and values of the T tokens are stored in ``kv``.
        """
        x = self.embedding(token_ids)
        if self._fused is not None and self._fused.suits(len(token_ids)):
            return self.norm(self._fused(x, positions, kv, metadata))
        angles = {rope: rotary.angles(positions, self.dtype) for rope, rotary in self.rotary.items()}
        for index, layer in enumerate(self.layers):
            group, slot = kv.layout.place(index)
            x = layer(x, angles[layer.rope], kv.keys[slot], kv.values[slot], metadata[group])
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, hidden] -> logits [R, vocab] float32."""
        logits = self.head.apply(hidden).float()
        softcap = self.spec.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


@dataclass(frozen=True, slots=True)
class _LayerBuilder:
    spec: ModelSpec
    weights: Weights
    linears: Linears
    backend: AttentionBackend
    device: torch.device

    def layer(self, index: int) -> DecoderLayer:
        spec, prefix = self.spec, layer_prefix(index)
        sandwich = spec.sandwich_norms
        after_attention = self.norm(prefix + "post_attention_layernorm.weight")
        return DecoderLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn.", spec.layer_windows[index]),
            attention_output_norm=after_attention if sandwich else None,
            mlp_norm=self.norm(prefix + "pre_feedforward_layernorm.weight") if sandwich else after_attention,
            mlp=self._mlp(prefix + "mlp."),
            mlp_output_norm=self.norm(prefix + "post_feedforward_layernorm.weight") if sandwich else None,
            rope=spec.rope if spec.layer_windows[index] is None else spec.rope_sliding or spec.rope,
        )

    def norm(self, name: str) -> RMSNorm:
        weight = self.weights.take(name).to(self.device)
        return RMSNorm(weight, self.spec.norm_eps, plus_one=self.spec.norm_plus_one)

    def _attention(self, prefix: str, window: int | None) -> SelfAttention:
        spec = self.spec
        return SelfAttention(
            qkv=self.linears.linear(prefix + "qkv_proj"),
            out=self.linears.linear(prefix + "o_proj"),
            q_norm=self.norm(prefix + "q_norm.weight") if spec.qk_norm else None,
            k_norm=self.norm(prefix + "k_norm.weight") if spec.qk_norm else None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.query_scale,
            window=window,
            softcap=spec.attention_softcap,
            backend=self.backend,
        )

    def _mlp(self, prefix: str) -> GatedMLP:
        return GatedMLP(
            self.linears.linear(prefix + "gate_up_proj"),
            self.linears.linear(prefix + "down_proj"),
            self.spec.activation,
        )
