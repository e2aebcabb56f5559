"""Which tensors a decoder wants, by Hugging Face's names."""

from ...cluster.model_spec import ModelSpec

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
OUTPUT = "output"
"""The linear of the logits: the head, or the embedding where they are tied."""
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def layer_prefix(layer: int) -> str:
    """Prefix of a layer's tensors."""
    return f"model.layers.{layer}."


def wanted_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor, in the order in which a decoder is built."""
    wanted: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        wanted |= {layer_prefix(layer) + name: shape for name, shape in _layer(spec).items()}
    wanted[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        wanted[HEAD] = (spec.vocab_size, spec.hidden_size)
    return wanted


def fused_linears(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The linears that a decoder applies, and whose weights each one stacks: those of one input are one linear."""
    fused: dict[str, tuple[str, ...]] = {}
    for layer in range(spec.num_layers):
        prefix = layer_prefix(layer)
        for name, parts in _FUSED.items():
            fused[prefix + name] = tuple(prefix + part for part in parts)
    fused[OUTPUT] = (EMBEDDING if spec.tie_embeddings else HEAD,)
    return {name: tuple(part.removesuffix(".weight") for part in parts) for name, parts in fused.items()}


def _layer(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (heads, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_heads, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_heads, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, heads, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    wanted: dict[str, Shape] = {}
    for name, (rows, columns, bias) in linears.items():
        wanted[name + ".weight"] = (rows, columns)
        if bias:
            wanted[name + ".bias"] = (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    wanted |= {name + ".weight": (hidden,) for name in norms}
    if spec.qk_norm:
        wanted |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    return wanted
