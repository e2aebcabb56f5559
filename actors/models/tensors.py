"""Which tensors a decoder wants, by Hugging Face's names, and which part of them a rank holds."""

from collections.abc import Sequence
from dataclasses import replace

from ...cluster.model_spec import ModelSpec
from ...cluster.model_tensors import EMBEDDING, HEAD, dim_sizes, expert_tensors, layer_tensors
from ...cluster.parallel_layout import ParallelLayout, RankLayout
from ...cluster.topology import Topology

Shape = tuple[int, ...]
Part = tuple[range, ...]
"""A range of each dimension of a tensor."""

OUTPUT = "output"
"""The linear of the logits: the head, or the embedding where they are tied."""
_ATTENTION = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
}
_LATENT_ATTENTION = {
    "self_attn.down_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "self_attn.queries_proj": ("self_attn.q_b_proj",),
    "self_attn.o_proj": ("self_attn.o_proj",),
}
_LATENT_KEYS = _LATENT_ATTENTION | {
    "self_attn.down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attn.queries_proj": ("self_attn.q_proj",),
}
"""Where only keys and values come from a latent."""
_MLP = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


SHARED_EXPERTS = (".shared_expert.", ".shared_experts.")
"""How families name the experts that every token passes."""


def slices(part: Part) -> tuple[slice, ...]:
    """For indexing."""
    return tuple(slice(extent.start, extent.stop) for extent in part)


def layer_prefix(layer: int) -> str:
    """Prefix of a layer's tensors."""
    return f"model.layers.{layer}."


def whole_model(spec: ModelSpec) -> RankLayout:
    """The only rank of a model that is not cut."""
    return ParallelLayout.of(spec, Topology()).ranks[0]


def rank_spec(own: RankLayout) -> ModelSpec:
    """The model as a rank computes it: its layers, heads and MLP columns; hidden size and vocabulary are whole."""
    spec, layers = own.spec, own.layers
    moe = spec.moe
    if moe is not None:
        moe = replace(moe, sparse_layers=moe.sparse_layers[layers.start : layers.stop])
    return replace(
        spec,
        num_layers=len(layers),
        layer_windows=spec.layer_windows[layers.start : layers.stop],
        num_heads=len(own.heads.queries),
        num_kv_heads=len(own.heads.kv),
        intermediate_size=len(own.cuts["inner"]),
        moe=moe,
    )


def wanted_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of a model."""
    return wanted_shapes(whole_model(spec))


def wanted_shapes(own: RankLayout) -> dict[str, Shape]:
    """Name and shape in the checkpoint of every tensor that a rank reads a part of."""
    sizes = dim_sizes(own.spec)
    return {name: tuple(sizes[dim] for dim in dims) for name, dims in own.loaded().items()}


def wanted_parts(own: RankLayout) -> dict[str, Part]:
    """The parts that it reads of those that it does not read whole."""
    sizes = dim_sizes(own.spec)
    return {
        name: own.part(dims)
        for name, dims in own.loaded().items()
        if any(len(own.cuts[dim]) < sizes[dim] for dim in dims)
    }


def fused_linears(own: RankLayout) -> dict[str, tuple[str, ...]]:
    """The linears that a rank applies, and whose weights each one stacks: those of one input are one linear."""
    fused: dict[str, tuple[str, ...]] = {}
    attention = _attention_linears(own.spec)
    for layer in own.layers:
        prefix = layer_prefix(layer)
        for name, parts in (attention if own.spec.is_sparse(layer) else attention | _MLP).items():
            fused[prefix + name] = tuple(prefix + part for part in parts)
        if own.spec.is_sparse(layer):
            fused |= sparse_linears(own.spec, layer, own.experts)
    if own.has_head:
        fused[OUTPUT] = (EMBEDDING if own.spec.tie_embeddings else HEAD,)
    return {name: tuple(part.removesuffix(".weight") for part in parts) for name, parts in fused.items()}


def _attention_linears(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    if spec.mla is None:
        return _ATTENTION
    return _LATENT_KEYS if spec.mla.q_lora_rank is None else _LATENT_ATTENTION


def sparse_linears(spec: ModelSpec, layer: int, experts: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """As ``fused_linears``, of one sparse MLP with these experts. Its gates are not among them: see ``Router``."""
    fused: dict[str, tuple[str, ...]] = {}
    groups = [list(expert_tensors(spec, layer, expert)) for expert in experts]
    shared = [
        name
        for name in layer_tensors(spec, layer)
        if any(part in name for part in SHARED_EXPERTS) and name.endswith(".weight")
    ]
    for names in [*groups, shared] if shared else groups:
        gate, up, down = (name.removesuffix(".weight") for name in names)
        prefix = gate.rpartition(".")[0]
        fused |= {f"{prefix}.gate_up_proj": (gate, up), f"{prefix}.down_proj": (down,)}
    return fused
