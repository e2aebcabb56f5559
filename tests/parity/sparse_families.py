"""Small random models with experts, and what else their families can be."""

from .conftest import Family

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 3}
QWEN = HEADS | {"num_experts": 8, "moe_intermediate_size": 24}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
GROUPS = {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}

FAMILIES = {
    "mixtral": Family("MixtralForCausalLM", {**HEADS, "num_local_experts": 8}),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {**QWEN, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True, "head_dim": 16}),
    "olmoe": Family("OlmoeForCausalLM", {**HEADS, "num_experts": 8, "clip_qkv": 1.5}),
    "deepseek_v2_lite": Family("DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
            # Angles and scores are scaled apart.
            "rope_parameters": YARN | {"mscale_all_dim": 0.5},
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**LATENT, **GROUPS, "n_shared_experts": 1, "num_mtp_layers": 0, "rope_parameters": YARN},
    ),
}
VARIANTS = {
    "mixtral-window": Family("MixtralForCausalLM", {**HEADS, "num_local_experts": 8, "sliding_window": 9}),
    "qwen2_moe-every-other": Family(
        "Qwen2MoeForCausalLM",
        {
            **QWEN,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe-every-other": Family(
        "Qwen3MoeForCausalLM",
        {
            **QWEN,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "head_dim": 24,
            "attention_bias": True,
        },
    ),
    "qwen3_moe-window": Family(
        "Qwen3MoeForCausalLM", {**QWEN, "use_sliding_window": True, "sliding_window": 7, "head_dim": 16}
    ),
    "olmoe-normed": Family(
        "OlmoeForCausalLM", {**HEADS, "num_experts": 8, "norm_topk_prob": True, "attention_bias": True}
    ),
    "deepseek_v2-biases": Family(
        "DeepseekV2ForCausalLM",
        {**LATENT, "q_lora_rank": 20, "attention_bias": True, "mlp_bias": True, "n_shared_experts": 2},
    ),
    "deepseek_v2_lite-bias": Family(
        "DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "deepseek_v3-halves": Family(
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "num_mtp_layers": 0,
            "first_k_dense_replace": 0,
        },
    ),
}
