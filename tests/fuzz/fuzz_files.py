"""Readers of a model's files: GGUF, safetensors, packed weights, config.json, tokenizer.json, chat templates."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz_formats import as_gguf, as_json, as_packed, as_safetensors
from fuzz_target import Target
from small_tokenizers import CHATML, byte_level

from warmroot.actors.layers.grouped import GroupedWeight
from warmroot.actors.models.gguf_source import GgufSource
from warmroot.actors.models.packed_file import map_packed
from warmroot.actors.models.safetensors_source import SafetensorsSource
from warmroot.actors.models.spec import read_quantization, read_spec, stored_dtype, stored_format
from warmroot.actors.models.tensors import wanted_tensors
from warmroot.actors.models.weights import Weights
from warmroot.cluster.errors import ConfigError, InvalidRequestError, ModelLoadError
from warmroot.cluster.model_spec import ModelSpec
from warmroot.router.chat_template import ChatTemplate
from warmroot.router.tokenizer import Tokenizer

REFUSED = (ModelLoadError, ConfigError)
F32, Q8_0 = 0, 8


def _in_folder(run: Callable[[Path, bytes], object]) -> Callable[[bytes], object]:
    def in_new_folder(data: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="warmroot-fuzz-") as folder:
            return run(Path(folder), data)

    return in_new_folder


def llama_gguf(hidden: int = 32, layers: int = 1, storage: int = F32) -> dict[str, Any]:
    """A whole Llama of a few kilobytes."""
    vocab = byte_level_tokens()
    shapes = {"token_embd.weight": [hidden, len(vocab)], "output_norm.weight": [hidden]}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}.weight": [hidden, hidden] for name in ("attn_q", "attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{name}.weight": [hidden, hidden] for name in ("attn_output", "ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down.weight": [hidden, hidden]}
        shapes |= {f"blk.{layer}.{name}.weight": [hidden] for name in ("attn_norm", "ffn_norm")}
    tensors, offset = [], 0
    for name, dims in shapes.items():
        kind = storage if len(dims) > 1 else F32
        tensors.append([name, dims, kind, offset])
        size = 4 if kind == F32 else 34 / 32
        for dim in dims:
            size *= dim
        offset += int(size)
    return {"version": 3, "metadata": llama_metadata(hidden, layers), "tensors": tensors, "data": offset}


def llama_metadata(hidden: int, layers: int) -> dict[str, Any]:
    vocab = byte_level_tokens()
    return {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": layers,
        "llama.context_length": 64,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [1] * (len(vocab) - 1) + [3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": len(vocab) - 1,
        "tokenizer.ggml.eos_token_id": len(vocab) - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@cache
def byte_level_tokens() -> list[str]:
    from warmroot.router.byte_alphabet import BYTE_TO_CHAR

    return [BYTE_TO_CHAR[byte] for byte in range(256)] + ["<|im_end|>"]


def _with(metadata: dict[str, Any], drop: str = "llama.", **changed: Any) -> dict[str, Any]:
    """The Llama under another architecture's name and with its facts."""
    name = changed["general_architecture"]
    kept = {key.replace("llama.", f"{name}."): value for key, value in metadata.items()}
    kept["general.architecture"] = name
    facts = {key: value for key, value in changed.items() if key != "general_architecture"}
    return kept | {f"{name}.{key.replace('__', '.')}": value for key, value in facts.items()}


def gguf_seeds() -> list[Any]:
    """Families whose facts are read by code of their own."""
    llama = llama_gguf()
    plain = llama["metadata"]
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    others = [
        _with(plain, general_architecture="llama", rope__scaling__type="yarn", rope__scaling__factor=4.0,
              rope__scaling__original_context_length=32),
        _with(plain, general_architecture="gemma3", attention__sliding_window=16, attn_logit_softcapping=50.0,
              attention__sliding_window_pattern=[True]),
        _with(plain, general_architecture="qwen2moe", **experts, expert_shared_feed_forward_length=32),
        _with(plain, general_architecture="deepseek2", **experts, attention__kv_lora_rank=16,
              attention__key_length_mla=24, attention__value_length_mla=16, leading_dense_block_count=1,
              expert_gating_func=2, expert_group_count=2, expert_group_used_count=1),
        {**plain, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 257,
         "tokenizer.ggml.unknown_token_id": 0},
    ]  # fmt: skip
    quantised = llama_gguf(storage=Q8_0)
    return [llama, quantised, *({**llama, "metadata": metadata} for metadata in others)]


@_in_folder
def read_gguf(folder: Path, data: bytes) -> None:
    """All that a start reads of a GGUF file: facts, tokenizer, every tensor."""
    path = folder / "m.gguf"
    path.write_bytes(data)
    spec = read_spec(path)
    stored_format(path)
    _read_weights(GgufSource(path), spec)


@_in_folder
def read_gguf_tokenizer(folder: Path, data: bytes) -> None:
    path = folder / "m.gguf"
    path.write_bytes(data)
    _use_tokenizer(Tokenizer.from_path(path))


def _read_weights(source: Any, spec: ModelSpec) -> None:
    wanted = wanted_tensors(spec)
    weights = Weights(source, wanted)
    assert source.dtype in (torch.float32, torch.float16, torch.bfloat16) and source.files
    for name, shape in wanted.items():
        if source.block_type(name) is not None:
            source.read_blocks(name) if not isinstance(source, SafetensorsSource) else source.read_grouped(name)
        assert source.read(name).shape == shape, name
    assert weights.source is source


def _use_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello the world \U0001f600 <|im_end|>\x00")
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    detokenizer = tokenizer.detokenizer()
    for token_id in ids:
        detokenizer.push([token_id])
        tokenizer.token_text(token_id)
    detokenizer.flush()
    if tokenizer.chat_template is not None:
        _render(tokenizer.chat_template, tokenizer.special_tokens)


def _render(source: str, special: dict[str, str]) -> None:
    template = ChatTemplate(source, special, now=lambda: datetime(2026, 1, 1))
    with suppress(InvalidRequestError):
        assert isinstance(template.render([{"role": "user", "content": "hi"}]), str)


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def config_seeds() -> list[Any]:
    def named(name: str, **facts: Any) -> dict[str, Any]:
        return {**LLAMA_CONFIG, "architectures": [name], **facts}

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
            "mscale_all_dim": 1.0}  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
              "n_routed_experts": 4, "topk_group": 1, "n_group": 2, "first_k_dense_replace": 0}  # fmt: skip
    groups = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    return [
        LLAMA_CONFIG,
        named("LlamaForCausalLM", rope_scaling=yarn, quantization_config={"quant_method": "gptq", **groups}),
        named("MistralForCausalLM", sliding_window=16, quantization_config={"quant_method": "awq", "w_bit": 4}),
        named("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"]),
        named("Gemma3ForCausalLM", query_pre_attn_scalar=16, sliding_window_pattern=2, rope_local_base_freq=1e4,
              rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}),
        named("Qwen2MoeForCausalLM", **experts, shared_expert_intermediate_size=16, mlp_only_layers=[],
              decoder_sparse_step=1),
        named("DeepseekV3ForCausalLM", **experts, **latent, rope_scaling=yarn),
        named("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    ]  # fmt: skip


@_in_folder
def read_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    spec = read_spec(folder)
    read_quantization(folder)
    stored_dtype(folder)
    assert len(spec.layer_windows) == spec.num_layers and spec.num_parameters > 0
    assert wanted_tensors(spec)


@_in_folder
def read_generation_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(as_json(LLAMA_CONFIG))
    (folder / "generation_config.json").write_bytes(data)
    assert all(isinstance(token_id, int) for token_id in read_spec(folder).eos_token_ids)


def _plain_tensors() -> dict[str, tuple[int, ...]]:
    from warmroot.cluster.model_config import spec_from_hf

    return wanted_tensors(spec_from_hf(LLAMA_CONFIG))


def _header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    sizes, header, offset = {"F32": 4, "F16": 2, "I32": 4}, {}, 0
    for name, (dtype, shape) in tensors.items():
        size = sizes[dtype]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return {"header": header, "data": offset}


def safetensors_seeds() -> list[Any]:
    return [_header({name: (dtype, shape) for name, shape in _plain_tensors().items()}) for dtype in ("F32", "F16")]


@_in_folder
def read_safetensors(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(as_json(LLAMA_CONFIG))
    (folder / "model.safetensors").write_bytes(data)
    _read_weights(SafetensorsSource(folder), read_spec(folder))


def index_seeds() -> list[Any]:
    return [{"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(_plain_tensors(), "one.safetensors")}]


@_in_folder
def read_index(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(as_json(LLAMA_CONFIG))
    (folder / "one.safetensors").write_bytes(as_safetensors(safetensors_seeds()[0]))
    (folder / "model.safetensors.index.json").write_bytes(data)
    source = SafetensorsSource(folder)
    assert all(path.resolve().parent == folder.resolve() for path in source.files), "files outside the folder"
    _read_weights(source, read_spec(folder))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}


def grouped_seeds() -> list[Any]:
    """A GPTQ checkpoint whose features say by themselves which group they are in: the file holds the indices."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in _plain_tensors().items():
        if ".layers." not in name or "norm" in name:
            tensors[name] = ("F32", shape)
            continue
        rows, columns = shape
        parts = {"qweight": (columns // 8, rows), "qzeros": (1, rows // 8), "g_idx": (columns,)}
        tensors |= {f"{name.removesuffix('.weight')}.{part}": ("I32", dims) for part, dims in parts.items()}
        tensors[name.removesuffix("weight") + "scales"] = ("F16", (1, rows))
    return [_header(tensors)]


def as_grouped(tree: dict[str, Any]) -> bytes:
    """With zeros for data: every feature in group 0. A ``fill`` is what stands in the file instead."""
    data = as_safetensors({**tree, "data": 0})
    return data + bytes([int(tree.get("fill", 0)) % 256]) * min(int(tree["data"]), 2**20)


@_in_folder
def read_grouped(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(as_json({**LLAMA_CONFIG, "quantization_config": GPTQ}))
    (folder / "model.safetensors").write_bytes(data)
    source = SafetensorsSource(folder, read_quantization(folder))
    spec = read_spec(folder)
    _read_weights(source, spec)
    for name in wanted_tensors(spec):
        grouped = source.read_grouped(name)
        if isinstance(grouped, GroupedWeight) and grouped.order is not None:
            assert int(grouped.order.min()) >= -1 and int(grouped.order.max()) < grouped.in_features


@_in_folder
def read_packed(folder: Path, data: bytes) -> None:
    """What the kernels are given lies inside the file, and takes no feature that is not there."""
    path = folder / "packed.bin"
    path.write_bytes(data)
    packed = map_packed(path)
    for parts in packed.parts.values():
        for part in parts:
            assert part.data.numel() <= len(data) and part.data.data_ptr() % 4 == 0
            assert part.order is None or part.order.numel() == part.shape[1]


def packed_seeds() -> list[Any]:
    from warmroot.actors.kernels.linear import Offsets, WeightFormat, packed_bytes

    linears, place = {}, 64 * 64
    for kind in (WeightFormat.F32, WeightFormat.Q8, WeightFormat.Q4):
        size = packed_bytes(kind, Offsets.NONE, 16, 32)
        entry = {"format": int(kind), "offsets": 0, "shape": [16, 32], "data": [place, size], "bias": [0, 64]}
        linears[f"model.layers.0.{kind.name}"] = [{**entry, "order": [128, 128] if kind.is_quantised else None}]
        place += -(-size // 64) * 64
    table = {"dtype": "float16", "shape": [16, 32], "data": [0, 1024]}
    return [{"index": {"name": "q4", "table": table, "linears": linears}, "data": place}]


@_in_folder
def read_tokenizer(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    _use_tokenizer(Tokenizer.from_path(folder))


@_in_folder
def read_tokenizer_config(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_text(byte_level().to_dict()["tokenizer"])
    (folder / "tokenizer_config.json").write_bytes(data)
    _use_tokenizer(Tokenizer.from_path(folder))


def tokenizer_seeds() -> list[Any]:
    return [json.loads(byte_level().to_dict()["tokenizer"])]


def tokenizer_config_seeds() -> list[Any]:
    token = {"content": "<x>", "special": True, "lstrip": False, "normalized": False}
    return [
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "add_eos_token": True,
         "added_tokens_decoder": {"300": token}, "chat_template": CHATML},
        {"chat_template": [{"name": "default", "template": CHATML}, {"name": "tools", "template": ""}]},
    ]  # fmt: skip


def read_template(data: bytes) -> None:
    _render(data.decode("utf-8", "replace"), {"eos_token": "</s>"})


def template_seeds() -> list[Any]:
    llama = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% endif %}"
    loop = "{% for m in messages %}{{ loop.index0 }}{{ m.content | tojson }}{% endfor %}{{ strftime_now('%Y') }}"
    return [text.encode() for text in (CHATML, llama, loop, "{{ raise_exception('no') }}", "{% set x = namespace() %}")]


TARGETS = (
    Target("gguf", read_gguf, gguf_seeds, REFUSED, as_gguf),
    Target("gguf_tokenizer", read_gguf_tokenizer, gguf_seeds, REFUSED, as_gguf),
    Target("safetensors", read_safetensors, safetensors_seeds, REFUSED, as_safetensors),
    Target("safetensors_index", read_index, index_seeds, REFUSED, as_json),
    Target("gptq", read_grouped, grouped_seeds, REFUSED, as_grouped),
    Target("packed_weights", read_packed, packed_seeds, (ValueError, OSError), as_packed),
    Target("config_json", read_config, config_seeds, REFUSED, as_json),
    Target("generation_config", read_generation_config, lambda: [{"eos_token_id": [2, 3]}], REFUSED, as_json),
    Target("tokenizer_json", read_tokenizer, tokenizer_seeds, REFUSED, as_json),
    Target("tokenizer_config", read_tokenizer_config, tokenizer_config_seeds, REFUSED, as_json),
    Target("chat_template", read_template, template_seeds, REFUSED),
)
