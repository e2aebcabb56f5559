"""Published configurations, as transformers 4 and 5 write them, become the right facts."""

import pytest

from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.model_config import spec_from_gguf, spec_from_hf
from warmroot.cluster.model_spec import RopeSpec

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 20,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def test_llama_31():
    spec = spec_from_hf(LLAMA_31_8B)
    assert (spec.head_dim, spec.num_kv_heads, spec.layer_windows) == (128, 8, (None,) * 32)
    assert spec.rope == RopeSpec(
        theta=500000.0,
        rotary_dim=128,
        scaling_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    assert spec.max_position == 131072
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.num_parameters == 8_030_261_248


def test_mistral_sees_its_window():
    spec = spec_from_hf(MISTRAL_7B)
    assert spec.layer_windows == (4096,) * 32
    assert spec.num_parameters == 7_241_732_096
    assert spec_from_hf(MISTRAL_7B | {"sliding_window": None}).layer_windows == (None,) * 32


def test_qwen2_has_biases_and_windows_only_on_request():
    spec = spec_from_hf(QWEN25_7B)
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == (True, False, False)
    assert spec.layer_windows == (None,) * 28
    assert spec.num_parameters == 7_615_616_512
    sliding = spec_from_hf(QWEN25_7B | {"use_sliding_window": True})
    assert sliding.layer_windows == (None,) * 20 + (131072,) * 8


def test_qwen_yarn_stretches_the_context():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    spec = spec_from_hf(QWEN25_7B | {"rope_scaling": scaling})
    assert (spec.rope.scaling_type, spec.rope.factor, spec.max_position) == ("yarn", 4.0, 131072)


def test_qwen3():
    spec = spec_from_hf(QWEN3_06B)
    assert (spec.qk_norm, spec.qkv_bias, spec.head_dim, spec.tie_embeddings) == (True, False, 128, True)
    assert spec.num_parameters == 596_049_920


def test_gemma2_alternates_windows():
    spec = spec_from_hf(GEMMA2_2B)
    assert spec.layer_windows == (4096, None) * 13
    assert (spec.attention_softcap, spec.logit_softcap, spec.query_scale) == (50.0, 30.0, 1 / 16)
    assert (spec.norm_plus_one, spec.sandwich_norms, spec.tie_embeddings) == (True, True, True)
    assert (spec.activation, spec.embedding_scale) == ("gelu_tanh", 48.0)
    assert spec.num_parameters == 2_614_341_888
    assert spec_from_hf(GEMMA2_2B | {"attn_logit_softcapping": None}).attention_softcap is None


def test_gemma3_text_inside_the_multimodal_model():
    spec = spec_from_hf(GEMMA3_4B)
    assert spec.layer_windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert spec.rope == RopeSpec(
        theta=1e6, rotary_dim=256, scaling_type="linear", factor=8.0, original_max_position=131_072
    )
    assert spec.rope_sliding == RopeSpec(theta=10000.0, rotary_dim=256)
    assert (spec.qk_norm, spec.attention_softcap, spec.logit_softcap) == (True, None, None)
    assert spec.eos_token_ids == (1, 106)


def test_transformers_5_says_the_same():
    modern = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope_")}
    modern["rope_parameters"] = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    assert spec_from_hf(modern) == spec_from_hf(LLAMA_31_8B)

    text = {key: value for key, value in GEMMA3_4B["text_config"].items() if key != "rope_scaling"}
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    text["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4
    modern = GEMMA3_4B | {"text_config": text}
    found, expected = spec_from_hf(modern), spec_from_hf(GEMMA3_4B)
    assert (found.rope, found.layer_windows) == (expected.rope, expected.layer_windows)
    assert found.rope_sliding.theta == expected.rope_sliding.theta


def test_generation_config_adds_end_tokens():
    assert spec_from_hf(MISTRAL_7B, {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)
    assert spec_from_hf(QWEN3_06B, {"eos_token_id": 151643}).eos_token_ids == (151643, 151645)


def test_model_type_stands_in_for_architectures():
    assert spec_from_hf(MISTRAL_7B | {"architectures": None}).architecture == "mistral"


def test_other_head_size():
    spec = spec_from_hf(LLAMA_31_8B | {"head_dim": 64})
    assert (spec.head_dim, spec.query_scale, spec.rope.rotary_dim) == (64, 0.125, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*LlamaForCausalLM.*Gemma3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*yarn"),
        ({"hidden_act": "relu"}, "relu.*silu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size.*many"),
    ],
)
def test_what_is_not_supported_is_named(change, words):
    with pytest.raises(ModelLoadError, match=words):
        spec_from_hf(LLAMA_31_8B | change)


def test_unknown_layer_type_is_named():
    with pytest.raises(ModelLoadError, match="chunked_attention"):
        spec_from_hf(QWEN25_7B | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 28})


SMOLLM2_GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}


def test_gguf_llama():
    spec = spec_from_gguf(SMOLLM2_GGUF)
    assert (spec.head_dim, spec.vocab_size, spec.tie_embeddings, spec.eos_token_ids) == (64, 49152, True, (2,))
    assert spec.num_parameters == 134_515_008
    assert not spec_from_gguf(SMOLLM2_GGUF, {"output.weight"}).tie_embeddings


def test_gguf_gemma3():
    values = {key.replace("llama.", "gemma3."): value for key, value in SMOLLM2_GGUF.items()}
    values |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 512}
    spec = spec_from_gguf(values | {"tokenizer.ggml.eot_token_id": 106})
    assert spec.layer_windows == ((512,) * 5 + (None,)) * 5
    assert (spec.norm_plus_one, spec.sandwich_norms, spec.qk_norm) == (False, True, True)
    assert spec.eos_token_ids == (2, 106)
    large = spec_from_gguf(values | {"gemma3.block_count": 62})
    assert large.query_scale == pytest.approx((576 / 9) ** -0.5)


def test_gguf_of_another_kind_is_named():
    with pytest.raises(ModelLoadError, match=r"mamba.*llama.*gemma3"):
        spec_from_gguf({"general.architecture": "mamba"})
    with pytest.raises(ModelLoadError, match="longrope"):
        spec_from_gguf(SMOLLM2_GGUF | {"llama.rope.scaling.type": "longrope"})


OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_olmoe():
    spec = spec_from_hf(OLMOE_1B_7B)
    assert spec.num_parameters == 6_919_161_856
    assert (spec.moe.num_experts, spec.moe.experts_per_token, spec.moe.intermediate_size) == (64, 8, 1024)
    assert (spec.qk_norm, spec.qk_norm_whole, spec.moe.norm_topk_prob) == (True, True, False)
    assert spec.moe.touched_experts(1) == pytest.approx(8)
    assert spec.moe.touched_experts(16) == pytest.approx(64 * (1 - (7 / 8) ** 16))


def test_deepseek_v3():
    spec = spec_from_hf(DEEPSEEK_V3)
    assert spec.num_parameters == 671_026_419_200  # the published 671B, without its MTP layer
    assert spec.moe.sparse_layers == (False,) * 3 + (True,) * 58
    assert (spec.moe.scoring, spec.moe.n_group, spec.moe.topk_group) == ("sigmoid", 8, 4)
    assert (spec.moe.correction_bias, spec.moe.routed_scaling_factor) == (True, 2.5)
    assert (spec.head_dim, spec.rope.rotary_dim, spec.mla.cached_size) == (192, 64, 576)
    assert spec.query_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert (spec.rope.attention_factor, spec.max_position) == (1.0, 163840)


def test_families_that_the_decoder_cannot_run_are_refused():
    config = DEEPSEEK_V3 | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    with pytest.raises(
        ModelLoadError, match=r"architecture DeepseekV32\w+ is not supported; supported: LlamaFor.*DeepseekV3For[^,]*$"
    ):
        spec_from_hf(config)
    with pytest.raises(ModelLoadError, match="deepseek_v32 is not"):
        spec_from_hf({**config, "architectures": None})


def test_every_so_many_layers_are_sparse():
    spec = spec_from_hf(DEEPSEEK_V3 | {"moe_layer_freq": 3})
    assert [layer for layer in range(10) if spec.is_sparse(layer)] == [3, 6, 9]


def test_unknown_routing_is_named():
    with pytest.raises(ModelLoadError, match="topk_method hashed"):
        spec_from_hf(DEEPSEEK_V3 | {"topk_method": "hashed"})


def test_gguf_mixtral_is_llama_with_experts():
    spec = spec_from_gguf(SMOLLM2_GGUF | {"llama.expert_count": 8, "llama.expert_used_count": 2})
    assert spec.architecture == "mixtral"
    assert (spec.moe.num_experts, spec.moe.intermediate_size, spec.moe.norm_topk_prob) == (8, 1536, True)


@pytest.mark.parametrize(
    ("architecture", "family", "keys", "expected"),
    [
        ("qwen2moe", "qwen2_moe", {"expert_shared_feed_forward_length": 5632}, (1408, 5632, True, False)),
        ("qwen3moe", "qwen3_moe", {}, (1408, 0, False, True)),
        ("olmoe", "olmoe", {}, (1408, 0, False, False)),
    ],
)
def test_gguf_experts(architecture, family, keys, expected):
    keys = keys | {"expert_count": 60, "expert_used_count": 4, "expert_feed_forward_length": 1408}
    values = {key.replace("llama.", f"{architecture}."): value for key, value in SMOLLM2_GGUF.items()}
    values |= {"general.architecture": architecture} | {f"{architecture}.{key}": keys[key] for key in keys}
    spec = spec_from_gguf(values)
    moe = spec.moe
    assert spec.architecture == family
    found = (moe.intermediate_size, moe.shared_intermediate_size, moe.shared_gate, moe.norm_topk_prob)
    assert found == expected


DEEPSEEK_V3_GGUF = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 61,
    "deepseek2.context_length": 163840,
    "deepseek2.embedding_length": 7168,
    "deepseek2.feed_forward_length": 18432,
    "deepseek2.attention.head_count": 128,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
    "deepseek2.attention.q_lora_rank": 1536,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.rope.freq_base": 10000.0,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 4096,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.1,
    "deepseek2.leading_dense_block_count": 3,
    "deepseek2.expert_count": 256,
    "deepseek2.expert_used_count": 8,
    "deepseek2.expert_shared_count": 1,
    "deepseek2.expert_feed_forward_length": 2048,
    "deepseek2.expert_weights_scale": 2.5,
    "deepseek2.expert_weights_norm": True,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.expert_group_count": 8,
    "deepseek2.expert_group_used_count": 4,
    "deepseek2.vocab_size": 129280,
}


def test_gguf_deepseek_v3_says_what_its_config_says():
    spec, expected = (
        spec_from_gguf(DEEPSEEK_V3_GGUF, {"output.weight"}),
        spec_from_hf(DEEPSEEK_V3),
    )
    assert (spec.architecture, spec.moe, spec.mla) == (expected.architecture, expected.moe, expected.mla)
    assert (spec.rope, spec.head_dim, spec.num_kv_heads) == (expected.rope, expected.head_dim, expected.num_kv_heads)
    assert spec.query_scale == pytest.approx(expected.query_scale)
    assert spec.num_parameters == expected.num_parameters


def test_gguf_deepseek_v2_of_old():
    old = {key: value for key, value in DEEPSEEK_V3_GGUF.items() if "_mla" not in key and "gating" not in key}
    old |= {"deepseek2.attention.key_length": 192, "deepseek2.attention.value_length": 128}
    del old["deepseek2.attention.q_lora_rank"]
    spec = spec_from_gguf(old)
    assert (spec.architecture, spec.moe.scoring, spec.moe.correction_bias) == ("deepseek_v2", "softmax", False)
    assert (spec.mla.q_lora_rank, spec.mla.qk_nope_head_dim, spec.mla.v_head_dim) == (None, 128, 128)
