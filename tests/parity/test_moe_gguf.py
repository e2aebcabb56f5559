"""Models with experts from GGUF files, written here as llama.cpp's converter writes them: experts in stacks."""

import gguf
import numpy as np
import pytest
import torch

from warmroot.actors.models.gguf_source import GgufSource
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.spec import stored_format
from warmroot.cluster.topology import Topology

from .conftest import Family, PagedSequences
from .greedy_harness import GreedyEngine
from .sharded_harness import ThreadedGang, greedy_engine
from .test_family_gguf import NAMES, permute

CPU = torch.device("cpu")
STORED = NAMES | {
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "exp_probs_b": "exp_probs_b",
}
# Rows of whole blocks of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32,
    },
}
FAMILIES = {
    "llama": Family("MixtralForCausalLM", SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2moe": Family("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3moe": Family("Qwen3MoeForCausalLM", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "olmoe": Family("OlmoeForCausalLM", SIZES | {"num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek2": Family("DeepseekV2ForCausalLM", EXPERTS | LATENT | {"q_lora_rank": None}),
    "deepseek2 with sigmoid": Family(
        "DeepseekV3ForCausalLM",
        EXPERTS | LATENT | {"q_lora_rank": 32, "n_group": 3, "topk_group": 2, "num_mtp_layers": 0},
    ),
}
TOKENS = torch.randint(4, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def stored_tensors(model) -> dict[str, np.ndarray]:
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        layer = ""
        if module.startswith("model.layers."):
            layer, module = name.split(".", 3)[2:]
            module, _, kind = module.rpartition(".")
            layer = f"blk.{layer}."
        if module == "mlp.experts":  # transformers has no ``.weight`` here
            module, kind = f"{module}.{kind}", "weight"
        array = tensor.numpy()
        if module == "mlp.experts.gate_up_proj":
            gates, ups = np.split(array, 2, axis=1)
            tensors |= {f"{layer}ffn_gate_exps.weight": gates, f"{layer}ffn_up_exps.weight": ups}
            continue
        if kind == "e_score_correction_bias":
            module, kind = "exp_probs_b", "bias"
        if config.model_type == "deepseek_v3" and module == "self_attn.kv_b_proj":  # as newer files have it
            heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            tensors |= {f"{layer}attn_k_b.weight": keys.swapaxes(1, 2), f"{layer}attn_v_b.weight": values}
            continue
        if config.model_type == "mixtral" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            queries = module == "self_attn.q_proj"
            array = permute(array, config.num_attention_heads if queries else config.num_key_value_heads)
        tensors[f"{layer}{STORED[module]}.{kind}"] = array.squeeze()
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def write_gguf(path, architecture, model, storage):
    """All linears in one format, norms and gates in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture.split()[0])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_expert_count(6)
    writer.add_expert_used_count(2)
    if architecture == "qwen3moe":
        writer.add_key_length(config.head_dim)
    if architecture.startswith("deepseek2"):
        add_latent_attention(writer, config, is_v3=config.model_type == "deepseek_v3")
    if architecture not in ("llama", "olmoe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    for name, array in stored_tensors(model).items():
        if array.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quantize(array, storage), raw_dtype=storage)
        else:
            writer.add_tensor(name, array)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def add_latent_attention(writer, config, is_v3):
    head, rotated = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(is_v3)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_scaling_yarn_log_mul(0.1 * 0.7)
    if is_v3:
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(config.kv_lora_rank + rotated)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    else:
        writer.add_key_length(head)
        writer.add_value_length(config.v_head_dim)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return request.param, FAMILIES[request.param].build()


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "model.gguf"
    write_gguf(path, *model, gguf.GGMLQuantizationType.Q8_0)
    return path


def logits(path, **options):
    return PagedSequences(load_model(path, device=CPU, **options)).step({0: TOKENS})[0]


@torch.no_grad()
def test_floats_are_those_of_transformers(model, tmp_path):
    architecture, reference = model
    write_gguf(tmp_path / "model.gguf", architecture, reference, gguf.GGMLQuantizationType.F32)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "model.gguf", dtype="float32"), expected, atol=1e-3, rtol=0)


def test_an_expert_is_read_from_its_place_in_the_stack(model, quantized):
    architecture, reference = model
    source = GgufSource(quantized)
    prefix, names = ("block_sparse_moe", "w2") if architecture == "llama" else ("mlp", "down_proj")
    name = f"model.layers.1.{prefix}.experts.4.{names}.weight"
    exact = reference.state_dict()["model.layers.1.mlp.experts.down_proj"][4]
    assert source.shape(name) == tuple(exact.shape)
    assert source.shape(name.replace(".4.", ".6.")) is None
    assert (source.read(name) - exact).abs().max() < 0.02
    whole, blocks = source.read(name), source.read_blocks(name)
    assert blocks is not None and blocks.shape == (64, exact.shape[1] // 32 * 34)
    rows = (range(16, 48), range(0, 32))
    assert torch.equal(source.read(name, rows), whole[16:48, :32])
    assert torch.equal(source.read_blocks(name, rows), blocks[16:48, :34])
    assert torch.equal(source.read(name, (range(64), range(8, 24))), whole[:, 8:24])  # torn blocks
    assert source.read_blocks(name, (range(64), range(8, 24))) is None


def test_blocks_are_multiplied_as_they_are(quantized):
    assert stored_format(quantized) == "q8_0"
    kept, exact = load_model(quantized, device=CPU, dtype="auto"), logits(quantized, dtype="float32")
    assert kept.weights_format in ("q8_0", "float16")
    found = PagedSequences(kept).step({0: TOKENS})[0]
    # Inputs are rounded to 8 bits, so that here and there a token goes to another expert.
    assert (found - exact).abs().median() < 0.15 * exact.std()


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(tp=2, ep=2)], ids=["tp2", "tp2-ep2"])
def test_ranks_read_their_parts(quantized, topology):
    expected = GreedyEngine(load_model(quantized, device=CPU, dtype="float32")).generate([TOKENS, TOKENS[:7]], 8)
    gang = ThreadedGang(quantized, topology, dtype="float32")
    assert greedy_engine(gang, 100).generate([TOKENS, TOKENS[:7]], 8) == expected
