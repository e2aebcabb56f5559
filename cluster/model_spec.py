"""The facts about a model that layers, loaders, the KV layout and the capacity plan need.

The families differ in data, not in code: one decoder reads this.
"""

from dataclasses import dataclass, field
from typing import Literal


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
class ModelSpec:
    """A decoder-only transformer. Lengths in tokens, sizes in elements."""

    architecture: Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
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

    @property
    def num_parameters(self) -> int:
        """Weights of all layers, embedding and head (tied ones once), norms included."""
        hidden, heads, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        attention = hidden * (heads + 2 * kv) + heads * hidden
        attention += (heads + 2 * kv) * self.qkv_bias + hidden * self.o_bias
        mlp = 3 * hidden * self.intermediate_size
        mlp += (2 * self.intermediate_size + hidden) * self.mlp_bias
        norms = hidden * (4 if self.sandwich_norms else 2) + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + embeddings + hidden
