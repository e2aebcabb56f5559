"""The facts about a model that layers, loaders, the KV layout and the capacity plan need.

The families differ in data, not in code: one decoder reads this.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from .model_tensors import count_parameters

Architecture = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
]

MLA_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer, with the names of Hugging Face's ``rope_scaling`` keys."""

    theta: float = 10000.0
    rotary_dim: int
    scaling_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN: round the bounds of its ramp to whole dimensions."""
    frequency_factors: tuple[float, ...] = ()
    """GGUF files hold llama3's scaling as [rotary_dim / 2] divisors of the inverse frequencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Sparse MLPs: a router sends each token to ``experts_per_token`` of ``num_experts`` gated MLPs.

    Router, in float32: scores [N] = softmax or sigmoid of gate(x). The choice is by scores + correction bias; with
    groups, the best ``topk_group`` of ``n_group`` groups of consecutive experts stay in it. A group counts as its
    best expert (softmax, DeepSeek-V2) or the sum of its best two (sigmoid, DeepSeek-V3). The chosen experts' weights
    are their scores without the bias, divided by their sum if ``norm_topk_prob``, times ``routed_scaling_factor``.
    Output: sum of weight * expert(x), plus the shared expert's, times sigmoid(shared_expert_gate(x)) if gated.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    sparse_layers: tuple[bool, ...]
    """Per layer: experts, or a dense MLP of the model's ``intermediate_size``."""
    shared_intermediate_size: int = 0
    """Of the shared experts, taken together as one MLP (0: none)."""
    shared_gate: bool = False
    """Qwen2-MoE scales the shared expert's output by a sigmoid."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    """Mixtral always normalises. DeepSeek-V3 adds 1e-20 to the sum; the V2 router of transformers never does it."""
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    correction_bias: bool = False
    """DeepSeek-V3's ``e_score_correction_bias`` [N] float32: it steers the choice, not the weights."""

    def touched_experts(self, tokens: int) -> float:
        """Expected number of experts with work among ``tokens`` tokens, if all experts are equally liked."""
        return self.num_experts * (1.0 - (1.0 - self.experts_per_token / self.num_experts) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with Hugging Face's names for its sizes.

    Queries: q_proj, or q_b(norm(q_a(x))) with ``q_lora_rank``; each head has ``qk_nope_head_dim`` plain and
    ``qk_rope_head_dim`` rotated elements. kv_a(x) is the latent [kv_lora_rank], normed, and one rotated key
    [qk_rope_head_dim] that all heads share: these are what is cached. kv_b makes plain keys and values per head.
    Both inner norms have eps MLA_NORM_EPS. ``ModelSpec.query_scale`` holds YaRN's mscale squared.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    """The rotation turns neighbours (x0, x1), (x2, x3), ... rather than halves."""

    @property
    def cached_size(self) -> int:
        """Elements cached per token and layer: the latent and the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Lengths in tokens, sizes in elements."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    """With MLA as many as heads: what is cached is one latent instead."""
    head_dim: int
    """Of queries and keys; with MLA plain and rotated part together."""
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    rope_sliding: RopeSpec | None = None
    """Gemma 3 rotates its sliding layers with another base."""
    layer_windows: tuple[int | None, ...]
    """Per layer: tokens a query sees (itself included), or None for all."""
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    """OLMoE normalises all heads' queries, and all heads' keys, as one vector."""
    qkv_clip: float | None = None
    """OLMoE's ``clip_qkv``: bound of queries, keys and values before rotation."""
    norm_plus_one: bool = False
    """Gemma's checkpoints store norm weights minus one."""
    sandwich_norms: bool = False
    """Gemma also normalises each block's output before it is added."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    query_scale: float
    """Softmax scale, usually head_dim ** -0.5."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default_factory=tuple)
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    @property
    def cache_heads(self) -> int:
        """Keys that a token leaves in a layer's cache."""
        return self.num_kv_heads if self.mla is None else 1

    @property
    def cache_dim(self) -> int:
        """Elements of one of them."""
        return self.head_dim if self.mla is None else self.mla.cached_size

    @property
    def cached_elements(self) -> int:
        """Per token and layer, keys and values; MLA's values are part of its keys."""
        return self.cache_heads * self.cache_dim * (2 if self.mla is None else 1)

    @property
    def num_parameters(self) -> int:
        """Weights of all layers, embedding and head (tied ones once), norms included."""
        return count_parameters(self)

    def first_layers(self, count: int) -> "ModelSpec":
        """The model without all layers but the first ``count``."""
        moe = self.moe
        if moe is not None:
            moe = replace(moe, sparse_layers=moe.sparse_layers[:count])
        return replace(self, num_layers=count, layer_windows=self.layer_windows[:count], moe=moe)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is made of experts."""
        return self.moe is not None and self.moe.sparse_layers[layer]
