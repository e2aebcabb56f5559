"""Sparse layers of every family against transformers' modules, in float32."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
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

from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import NativeMethod, WeightFormat
from warmroot.actors.layers.linear import DenseMethod, Linear, LinearMethod
from warmroot.actors.layers.moe import MoeMLP
from warmroot.actors.layers.moe_dispatch import LocalDispatch
from warmroot.actors.models.safetensors_source import SafetensorsSource
from warmroot.actors.models.sparse import SparseBuilder
from warmroot.actors.models.tensors import sparse_linears
from warmroot.actors.models.weights import Weights
from warmroot.cluster.expert_placement import initial_placement
from warmroot.cluster.model_config import spec_from_hf
from warmroot.cluster.model_tensors import dim_sizes, expert_tensors, layer_tensors

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
}
QWEN = SMALL | {"num_experts": 8, "moe_intermediate_size": 24}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=8)),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=40)),
    "qwen2_moe_normed": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=40, norm_topk_prob=True),
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN, norm_topk_prob=True, head_dim=32)),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SMALL, num_experts=8)),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config(**DEEPSEEK)),
    "deepseek_v2_grouped": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(**DEEPSEEK, **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    ),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**DEEPSEEK, **GROUPS, num_mtp_layers=0)),
    "deepseek_v3_unnormed": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**DEEPSEEK, **GROUPS, num_mtp_layers=0, norm_topk_prob=False, routed_scaling_factor=1.0),
    ),
}
METHODS = [DenseMethod(torch.float32, CPU)]
if native() is not None:
    METHODS.append(NativeMethod(WeightFormat.F32))


def random_model(name: str) -> torch.nn.Module:
    kind, config = MODELS[name]
    torch.manual_seed(5)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for _, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0.0, 0.3)
    return model


@dataclass(frozen=True)
class SparseLinears:
    """The linears of one sparse layer, out of a checkpoint."""

    weights: Weights
    modules: dict[str, tuple[str, ...]]
    method: LinearMethod

    def linear(self, name: str) -> Linear:
        stacked = torch.cat([self.weights.take(module + ".weight") for module in self.modules[name]])
        return self.method.prepare(stacked, None)


def ours(model: torch.nn.Module, folder: Path, method: LinearMethod) -> MoeMLP:
    """The first layer's MLP, read from what transformers writes."""
    model.save_pretrained(folder)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    spec = spec_from_hf(config)
    experts, sizes = range(spec.moe.num_experts), dim_sizes(spec)
    tensors = layer_tensors(spec, 0)
    for expert in experts:
        tensors |= expert_tensors(spec, 0, expert)
    wanted = {name: tuple(sizes[dim] for dim in dims) for name, dims in tensors.items()}
    weights = Weights(SafetensorsSource(folder), wanted)
    return SparseBuilder(
        spec=spec,
        moe=spec.moe,
        weights=weights,
        linears=SparseLinears(weights, sparse_linears(spec, 0, experts), method),
        placement=initial_placement(spec.moe.num_experts, 1),
        ep_rank=0,
        dispatch=LocalDispatch(),
        device=CPU,
    ).mlp(0)


@torch.inference_mode()
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_sparse_layers_are_those_of_transformers(name, method, tmp_path):
    model = random_model(name)
    mlp = ours(model, tmp_path, method)
    theirs = model.model.layers[0].mlp
    for count in (1, 2, 7, 64):
        x = torch.randn(count, 64)
        expected = theirs(x[None])[0]
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert mlp.take_loads().sum() == 3 * (1 + 2 + 7 + 64)
