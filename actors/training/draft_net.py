"""A small decoder of the Llama family that can be trained: some of a model's layers, and a head of its own."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...cluster.errors import ConfigError
from ...cluster.model_spec import ModelSpec
from ..layers.rotary import RotaryEmbedding

FAMILIES = ("llama", "qwen2")


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._head_dim = spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, queries, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=spec.o_bias)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Causal. [B, T, hidden] -> [B, T, hidden]."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = q.shape[1] // k.shape[1]
        k, v = _rotated(k, angles).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(_rotated(q, angles), k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = _MLP(spec)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Layers(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList([_Layer(spec) for _ in range(spec.num_layers)])
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)


class DraftNet(nn.Module):
    """Parameters have Hugging Face's names. The embedding is the model's and stays as it is."""

    def __init__(self, spec: ModelSpec, head: torch.Tensor) -> None:
        """``head`` [W, hidden] are the rows of the tokens that are guessed."""
        super().__init__()
        self.spec = spec
        self.model = _Layers(spec)
        self.lm_head = nn.Linear(spec.hidden_size, len(head), bias=False)
        self.lm_head.weight = nn.Parameter(head.float().clone())
        self.model.embed_tokens.requires_grad_(False)
        self._rotary = RotaryEmbedding(spec.rope, torch.device("cpu"))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] -> hidden states [B, T, hidden] after the final norm; ``lm_head`` makes logits [.., W] of them."""
        length = token_ids.shape[1]
        cos, sin = (part[:length] for part in self._rotary.table(length))
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, (cos, sin))
        return self.model.norm(x)


def _rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[B, heads, T, D] -> the same shape; cos and sin [T, D / 2]. ``layers.rotary.rotate`` has no gradient."""
    cos, sin = (part.to(x.dtype) for part in angles)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Which of a model's layers a draft starts from."""

    layers: tuple[int, ...]

    @classmethod
    def spread(cls, count: int, num_layers: int) -> "LayerChoice":
        """The first, the last and what lies evenly between. Raises ConfigError."""
        if not 1 <= count < num_layers:
            raise ConfigError(f"--layers: must be between 1 and {num_layers - 1} for this model, got {count}")
        return cls(tuple(round(index * (num_layers - 1) / max(1, count - 1)) for index in range(count)))

    def names(self, name: str) -> str:
        """The model's name of a draft's tensor."""
        if not name.startswith("model.layers."):
            return name
        _, _, index, rest = name.split(".", 3)
        return f"model.layers.{self.layers[int(index)]}.{rest}"


def check_layers(spec: ModelSpec) -> None:
    """Raises ConfigError for a model whose layers cannot be trained here."""
    problem = None
    if spec.architecture not in FAMILIES:
        problem = f"{spec.architecture} is not one of {', '.join(FAMILIES)}"
    elif any(window is not None for window in spec.layer_windows):
        problem = "layers with a sliding window are not supported"
    elif spec.rope.rotary_dim != spec.head_dim:
        problem = "heads that are rotated in part are not supported"
    if problem is not None:
        raise ConfigError(f"train-draft: {problem}; train-medusa trains heads for any model", param="model")
