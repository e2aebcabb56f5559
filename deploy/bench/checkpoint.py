"""A GGUF file of the Llama family as a Hugging Face folder, in fp32, for the peers that read nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from ...cluster.errors import ConfigError

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def as_folder(model: Path, scratch: Path) -> Path:
    """The model as a folder: itself, or an fp32 copy under ``scratch`` that is made once. Raises ConfigError."""
    if model.is_dir():
        return model
    folder = scratch / f"{model.stem}-fp32"
    if not (folder / "config.json").exists():
        _export(gguf.GGUFReader(model), folder)
    return folder


def _export(reader: gguf.GGUFReader, folder: Path) -> None:
    config = _config(reader)
    tensors = {_hf_name(tensor.name): torch.from_numpy(_hf_layout(tensor, config)) for tensor in reader.tensors}
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Last: the folder counts as complete once this file is there.
    (folder / "config.json").write_text(json.dumps(config))


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ConfigError(f"peers are given a copy of Llama models only, not of {architecture}", param="model")
    heads = int(_value(reader, "llama.attention.head_count"))
    hidden = int(_value(reader, "llama.embedding_length"))
    tokens = reader.get_field("tokenizer.ggml.tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "rms_norm_eps": float(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(_value(reader, "llama.rope.freq_base"))},
        "vocab_size": len(tokens.data) if tokens is not None else int(_value(reader, "llama.vocab_size")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "torch_dtype": "float32",
    }


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ConfigError(f"the GGUF file has no {key}", param="model")
    return field.contents()


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is not None:
        return f"model.layers.{layer[1]}.{_NAMES[layer[2]]}.weight"
    return f"{_NAMES[name.removesuffix('.weight')]}.weight"


def _hf_layout(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> np.ndarray:
    """fp32. GGUF interleaves the two halves of each rotary pair in q and k; Hugging Face does not."""
    array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    for kind, key in heads.items():
        if f".{kind}." in tensor.name:
            rows, columns = array.shape
            pairs = array.reshape(config[key], rows // config[key] // 2, 2, columns)
            array = pairs.swapaxes(1, 2).reshape(rows, columns)
    return np.ascontiguousarray(array)
