"""Specs of MoE families against transformers: its configuration classes, and every weight's name and shape."""

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from warmroot.actors.models.tensors import wanted_tensors
from warmroot.cluster.model_config import spec_from_hf
from warmroot.cluster.model_tensors import dim_sizes, end_tensors, expert_tensors, layer_tensors

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_key_value_heads": 4}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=6)),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(**SMALL, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    ),
    "qwen2_moe_mixed": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SMALL, num_experts=6, decoder_sparse_step=2, mlp_only_layers=[3], use_sliding_window=True, qkv_bias=False
        ),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SMALL, num_experts=6, moe_intermediate_size=24, norm_topk_prob=True, head_dim=32),
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SMALL, num_experts=6, clip_qkv=8.0)),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **SMALL | LATENT,
            n_routed_experts=6,
            q_lora_rank=None,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            rope_parameters=YARN,
        ),
    ),
    "deepseek_v2_grouped": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **SMALL | LATENT,
            n_routed_experts=6,
            q_lora_rank=40,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            routed_scaling_factor=16.0,
            attention_bias=True,
        ),
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **SMALL | LATENT,
            n_routed_experts=16,
            q_lora_rank=40,
            moe_intermediate_size=24,
            first_k_dense_replace=2,
            num_mtp_layers=0,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    kind, config = MODELS[request.param]
    with torch.device("meta"):
        return kind(config)


def spec_of(model):
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return spec_from_hf(config)


def test_every_weight_is_counted(model):
    buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert spec_of(model).num_parameters == sum(p.numel() for p in model.parameters()) + buffers


def test_layers_have_the_weights_that_transformers_has(model):
    """Experts stand stacked in transformers' modules, under ``mlp`` in every family."""
    spec, found = spec_of(model), {name: tuple(p.shape) for name, p in model.state_dict().items()}
    sizes, wanted = dim_sizes(spec), dict(end_tensors(spec))
    for layer in range(spec.num_layers):
        wanted |= layer_tensors(spec, layer)
    named = {name.replace("block_sparse_moe", "mlp"): tuple(sizes[d] for d in dims) for name, dims in wanted.items()}
    stacked = {name: shape for name, shape in found.items() if ".experts." in name}
    assert named == {name: shape for name, shape in found.items() if name not in stacked}
    sparse = [layer for layer in range(spec.num_layers) if spec.is_sparse(layer)]
    inner = sizes["expert_inner"]
    assert stacked == {
        f"model.layers.{layer}.mlp.experts.{name}": shape
        for layer in sparse
        for name, shape in {
            "gate_up_proj": (spec.moe.num_experts, 2 * inner, spec.hidden_size),
            "down_proj": (spec.moe.num_experts, spec.hidden_size, inner),
        }.items()
    }


def test_the_router_is_the_one_of_transformers(model):
    spec = spec_of(model)
    gate = next(m.mlp.gate for m in model.model.layers if hasattr(m.mlp, "gate"))
    assert (spec.moe.num_experts, spec.moe.experts_per_token) == (gate.num_experts, gate.top_k)
    assert spec.moe.routed_scaling_factor == getattr(gate, "routed_scaling_factor", 1.0)
    always, never = spec.architecture == "mixtral", spec.architecture == "deepseek_v2"
    assert spec.moe.norm_topk_prob == (always or (not never and gate.norm_topk_prob))
    if getattr(gate, "topk_method", None) == "greedy":
        assert (spec.moe.n_group, spec.moe.topk_group) == (1, 1)
    else:
        expected = (getattr(gate, "num_group", 1), getattr(gate, "topk_group", 1))
        assert (spec.moe.n_group, spec.moe.topk_group) == expected
    assert spec.moe.correction_bias == hasattr(gate, "e_score_correction_bias")
    assert spec.moe.shared_gate == hasattr(model.model.layers[-1].mlp, "shared_expert_gate") or not spec.is_sparse(3)


def routed(spec, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Weights [T, num_experts] of the chosen experts, zero elsewhere, word for word as MoeSpec describes them."""
    moe = spec.moe
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    liked = scores if bias is None else scores + bias
    if moe.n_group > 1:
        groups = liked.unflatten(-1, (moe.n_group, -1))
        best = groups.amax(-1) if moe.scoring == "softmax" else groups.topk(2).values.sum(-1)
        out = torch.ones_like(best).scatter(-1, best.topk(moe.topk_group).indices, 0.0)
        liked = groups.masked_fill(out[..., None].bool(), float("-inf")).flatten(-2)
    chosen = liked.topk(moe.experts_per_token).indices
    weights = scores.gather(-1, chosen)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, chosen, weights * moe.routed_scaling_factor)


@pytest.mark.parametrize("name", MODELS)
def test_routing_is_what_the_spec_says(name):
    kind, config = MODELS[name]
    torch.manual_seed(1)
    model = kind(config)
    gate = next(m.mlp.gate for m in model.model.layers if hasattr(m.mlp, "gate"))
    gate.weight.data.normal_()
    bias = getattr(gate, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_(std=0.3)
    with torch.no_grad():
        logits, weights, chosen = gate(torch.randn(40, config.hidden_size))
    expected = torch.zeros_like(logits).scatter(-1, chosen, weights)
    torch.testing.assert_close(routed(spec_of(model), logits, bias), expected)


def test_attention_is_the_one_of_transformers(model):
    spec, attention = spec_of(model), model.model.layers[0].self_attn
    assert spec.query_scale == pytest.approx(attention.scaling)
    assert spec.qkv_clip == getattr(model.config, "clip_qkv", None)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    assert spec.layer_windows == tuple(windows)
    if spec.mla is not None:
        assert spec.head_dim == attention.qk_head_dim
        assert (spec.mla.q_lora_rank, spec.mla.kv_lora_rank) == (attention.q_lora_rank, attention.kv_lora_rank)
        assert spec.rope.rotary_dim == attention.qk_rope_head_dim == spec.mla.qk_rope_head_dim
        assert (spec.mla.qk_nope_head_dim, spec.mla.v_head_dim) == (attention.qk_nope_head_dim, attention.v_head_dim)
        norms = [m.variance_epsilon for name, m in attention.named_modules() if name.endswith("layernorm")]
        assert set(norms) == {1e-6}


@pytest.mark.parametrize("tied", [False, True])
def test_dense_models_have_the_tensors_that_the_decoder_wants(tied):
    config = LlamaConfig(**SMALL, mlp_bias=True, attention_bias=True, tie_word_embeddings=tied).to_dict()
    spec = spec_from_hf(config | {"architectures": ["LlamaForCausalLM"]})
    tensors = dict(end_tensors(spec))
    for layer in range(spec.num_layers):
        tensors |= layer_tensors(spec, layer)
    sizes = dim_sizes(spec)
    assert {name: tuple(sizes[dim] for dim in dims) for name, dims in tensors.items()} == wanted_tensors(spec)


@pytest.mark.parametrize(
    ("family", "prefix", "names"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_are_named_as_in_published_checkpoints(family, prefix, names):
    spec = spec_from_hf(MODELS[family][1].to_dict())
    assert list(expert_tensors(spec, 3, 5)) == [f"model.layers.3.{prefix}.experts.5.{name}.weight" for name in names]
