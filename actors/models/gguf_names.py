"""GGUF's names of tensors for Hugging Face's. A layer's experts are one stack, expert by expert."""

from collections.abc import Container

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_SANDWICH_LAYER = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_STACKS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


def has_sandwich_norms(stored: Container[str]) -> bool:
    """Whether a file with these tensors is of a model that also normalises each block's output (Gemma)."""
    return "blk.0.post_ffw_norm.weight" in stored


def gguf_name(name: str, *, sandwich: bool = False) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``; an expert's is that of the stack it is in.

    Names that GGUF has not, and those of a family that normalises otherwise than the file, stay as they are.
    """
    module, _, kind = name.rpartition(".")
    if kind == "e_score_correction_bias":
        return f"blk.{module.split('.')[2]}.exp_probs_b.bias"
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    if expert_index(name) is not None:
        return f"blk.{layer}.{_STACKS[part.rpartition('.')[2]]}.{kind}"
    names = _SANDWICH_LAYER if sandwich else _LAYER
    return f"blk.{layer}.{names.get(part, part)}.{kind}"


def latent_halves(name: str) -> tuple[str, str] | None:
    """What newer files hold instead of MLA's ``kv_b_proj``; None for the name of another tensor.

    Keys [heads, kv_lora_rank, qk_nope_head_dim] and values [heads, v_head_dim, kv_lora_rank].
    """
    prefix, found, kind = name.partition(".kv_b_proj.")
    return (f"{prefix}.k_b_proj.{kind}", f"{prefix}.v_b_proj.{kind}") if found else None


def expert_index(name: str) -> int | None:
    """Which of its layer's experts a tensor is of; None if it is no routed expert's."""
    _, _, routed = name.partition(".experts.")
    return int(routed.partition(".")[0]) if routed else None
