"""Every tensor of a model: its name in published checkpoints and the dimensions of the model that it spans.

Counting parameters, sharding and reading shard by shard all follow from this one table: a rank that holds a part of
a dimension holds that part of each tensor. Linear weights are [out, in].
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .model_spec import MlaSpec, ModelSpec

Dim = Literal[
    "hidden",
    "vocab",
    "queries",
    "keys",
    "heads_out",
    "kv_expanded",
    "query_norm",
    "key_norm",
    "q_rank",
    "kv_rank",
    "kv_latent",
    "inner",
    "shared_inner",
    "expert_inner",
    "experts",
    "one",
]
"""heads_out: what the output projection reads. kv_expanded: MLA's plain keys and values of all heads. kv_latent: its
latent and shared key."""
Dims = tuple[Dim, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def dim_sizes(spec: "ModelSpec") -> dict[Dim, int]:
    """The whole size of every dimension that the model has."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes: dict[Dim, int] = {
        "hidden": spec.hidden_size,
        "vocab": spec.vocab_size,
        "queries": queries,
        "keys": keys,
        "heads_out": queries,
        "query_norm": queries if spec.qk_norm_whole else spec.head_dim,
        "key_norm": keys if spec.qk_norm_whole else spec.head_dim,
        "inner": spec.intermediate_size,
        "one": 1,
    }
    if spec.moe is not None:
        sizes["experts"] = spec.moe.num_experts
        sizes["expert_inner"] = spec.moe.intermediate_size
        sizes["shared_inner"] = spec.moe.shared_intermediate_size
    if spec.mla is not None:
        sizes["heads_out"] = spec.num_heads * spec.mla.v_head_dim
        sizes["kv_expanded"] = spec.num_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
        sizes["q_rank"] = spec.mla.q_lora_rank or 0
        sizes["kv_rank"] = spec.mla.kv_lora_rank
        sizes["kv_latent"] = spec.mla.cached_size
    return sizes


def end_tensors(spec: "ModelSpec", *, first: bool = True, last: bool = True) -> dict[str, Dims]:
    """Embedding, final norm and head of the stages that have them; a tied head is the embedding's table."""
    tensors: dict[str, Dims] = {}
    if first or (last and spec.tie_embeddings):
        tensors[EMBEDDING] = ("vocab", "hidden")
    if last:
        tensors[FINAL_NORM] = ("hidden",)
        if not spec.tie_embeddings:
            tensors[HEAD] = ("vocab", "hidden")
    return tensors


def layer_tensors(spec: "ModelSpec", layer: int) -> dict[str, Dims]:
    """One layer without its experts."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors: dict[str, Dims] = {f"{norm}.weight": ("hidden",) for norm in norms}
    tensors |= _attention(spec) if spec.mla is None else _latent_attention(spec, spec.mla)
    tensors |= _sparse_mlp(spec) if spec.is_sparse(layer) else _gated_mlp("mlp.", "inner", bias=spec.mlp_bias)
    return {f"model.layers.{layer}.{name}": dims for name, dims in tensors.items()}


def expert_tensors(spec: "ModelSpec", layer: int, expert: int) -> dict[str, Dims]:
    """One routed expert of a sparse layer."""
    prefix = f"model.layers.{layer}.{_sparse_prefix(spec)}experts.{expert}."
    names = ("w1", "w3", "w2") if spec.architecture == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    shapes: tuple[Dims, ...] = (("expert_inner", "hidden"), ("expert_inner", "hidden"), ("hidden", "expert_inner"))
    return {f"{prefix}{name}.weight": dims for name, dims in zip(names, shapes, strict=True)}


def count_elements(tensors: Mapping[str, Dims], sizes: Mapping[Dim, int]) -> int:
    """Elements of the tensors, the dimensions having these sizes."""
    return sum(prod(sizes[dim] for dim in dims) for dims in tensors.values())


def count_parameters(spec: "ModelSpec") -> int:
    """Elements of all tensors of a model."""
    sizes = dim_sizes(spec)
    total = count_elements(end_tensors(spec), sizes)
    for layer in range(spec.num_layers):
        total += count_elements(layer_tensors(spec, layer), sizes)
        if spec.moe is not None and spec.is_sparse(layer):
            total += spec.moe.num_experts * count_elements(expert_tensors(spec, layer, 0), sizes)
    return total


def _linear(name: str, out: Dim, inputs: Dim, *, bias: bool) -> dict[str, Dims]:
    tensors: dict[str, Dims] = {f"{name}.weight": (out, inputs)}
    if bias:
        tensors[f"{name}.bias"] = (out,)
    return tensors


def _attention(spec: "ModelSpec") -> dict[str, Dims]:
    tensors: dict[str, Dims] = (
        _linear("self_attn.q_proj", "queries", "hidden", bias=spec.qkv_bias)
        | _linear("self_attn.k_proj", "keys", "hidden", bias=spec.qkv_bias)
        | _linear("self_attn.v_proj", "keys", "hidden", bias=spec.qkv_bias)
        | _linear("self_attn.o_proj", "hidden", "heads_out", bias=spec.o_bias)
    )
    if spec.qk_norm:
        norms: dict[str, Dims] = {"self_attn.q_norm.weight": ("query_norm",), "self_attn.k_norm.weight": ("key_norm",)}
        tensors |= norms
    return tensors


def _latent_attention(spec: "ModelSpec", mla: "MlaSpec") -> dict[str, Dims]:
    inner_norms: dict[str, Dims] = {"self_attn.kv_a_layernorm.weight": ("kv_rank",)}
    queries = _linear("self_attn.q_proj", "queries", "hidden", bias=False)
    if mla.q_lora_rank is not None:
        inner_norms["self_attn.q_a_layernorm.weight"] = ("q_rank",)
        queries = _linear("self_attn.q_a_proj", "q_rank", "hidden", bias=spec.qkv_bias) | _linear(
            "self_attn.q_b_proj", "queries", "q_rank", bias=False
        )
    return (
        queries
        | _linear("self_attn.kv_a_proj_with_mqa", "kv_latent", "hidden", bias=spec.qkv_bias)
        | inner_norms
        | _linear("self_attn.kv_b_proj", "kv_expanded", "kv_rank", bias=False)
        | _linear("self_attn.o_proj", "hidden", "heads_out", bias=spec.o_bias)
    )


def _gated_mlp(prefix: str, inner: Dim, *, bias: bool) -> dict[str, Dims]:
    return (
        _linear(f"{prefix}gate_proj", inner, "hidden", bias=bias)
        | _linear(f"{prefix}up_proj", inner, "hidden", bias=bias)
        | _linear(f"{prefix}down_proj", "hidden", inner, bias=bias)
    )


def _sparse_mlp(spec: "ModelSpec") -> dict[str, Dims]:
    prefix = _sparse_prefix(spec)
    tensors = _linear(f"{prefix}gate", "experts", "hidden", bias=False)
    if spec.moe is not None and spec.moe.correction_bias:
        tensors[f"{prefix}gate.e_score_correction_bias"] = ("experts",)
    if spec.moe is not None and spec.moe.shared_intermediate_size:
        shared = "shared_expert" if spec.architecture == "qwen2_moe" else "shared_experts"
        tensors |= _gated_mlp(f"{prefix}{shared}.", "shared_inner", bias=spec.mlp_bias)
        if spec.moe.shared_gate:
            tensors |= _linear(f"{prefix}shared_expert_gate", "one", "hidden", bias=False)
    return tensors


def _sparse_prefix(spec: "ModelSpec") -> str:
    return "block_sparse_moe." if spec.architecture == "mixtral" else "mlp."
