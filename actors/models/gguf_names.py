"""GGUF's names of tensors for Hugging Face's."""

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
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SANDWICH_LAYER = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def has_sandwich_norms(stored: Container[str]) -> bool:
    """Whether a file with these tensors is of a model that also normalises each block's output (Gemma)."""
    return "blk.0.post_ffw_norm.weight" in stored


def gguf_name(name: str, *, sandwich: bool = False) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``. Raises KeyError for what GGUF has not."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    names = _SANDWICH_LAYER if sandwich else _LAYER
    return f"blk.{layer}.{names[part]}.{kind}"
