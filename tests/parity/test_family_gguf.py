"""Families from GGUF files, written here as llama.cpp's converter writes them."""

import gguf
import numpy as np
import pytest
import torch

from warmroot.actors.layers.rotary import inverse_frequencies
from warmroot.actors.models.loader import load_model, read_spec
from warmroot.cluster.model_config import spec_from_hf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def permute(weight, heads):
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stored_name(name, gemma):
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(NAMES | (GEMMA_NORMS if gemma else LLAMA_NORMS))[part]}.{kind}"


def write_gguf(path, model):
    config = model.config
    gemma = "gemma" in config.model_type
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    if gemma:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    add_rope(writer, config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            array = permute(array, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            array = permute(array, config.num_key_value_heads)
        if gemma and "norm" in name:
            array = array + 1
        writer.add_tensor(stored_name(name, gemma), np.ascontiguousarray(array))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def add_rope(writer, config):
    rope = config.rope_parameters
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        spec = spec_from_hf(config.to_dict()).rope
        plain = 1.0 / spec.theta ** (np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)
        writer.add_tensor("rope_freqs.weight", (plain / inverse_frequencies(spec).numpy()).astype(np.float32))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def test_gguf_equals_the_folder(family_reference, paged, tmp_path, monkeypatch):
    config = family_reference.config
    if "dynamic" in str(config.rope_parameters):
        pytest.skip("GGUF cannot say dynamic")
    if config.model_type in ("gemma2", "gemma3_text"):
        for layer in family_reference.model.layers:  # GGUF does not carry query_pre_attn_scalar
            monkeypatch.setattr(layer.self_attn, "scaling", config.head_dim**-0.5)
    windowed = config.model_type in ("mistral", "qwen2", "qwen3")  # GGUF has no windows for these
    tokens = list(range(20, 26 if windowed else 60))
    path = tmp_path / "model.gguf"
    write_gguf(path, family_reference)
    with torch.no_grad():
        expected = family_reference(torch.tensor([tokens])).logits[0]
    decoder = load_model(path, dtype="float32", device=torch.device("cpu"))
    torch.testing.assert_close(paged(decoder).step({0: tokens})[0], expected, atol=1e-3, rtol=0)
    assert read_spec(path).eos_token_ids == (2,)
