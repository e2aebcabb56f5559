"""GGUF metadata read as ``ModelSpec``: see ``model_config``."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any, cast

from .errors import ModelLoadError
from .model_config_moe import gguf_family, gguf_mla, gguf_mla_query_scale, gguf_moe
from .model_config_values import ROPE_SCALINGS, read_size, stretched_context, token_ids
from .model_families import QK_NORM, unsupported
from .model_spec import Architecture as Family
from .model_spec import ModelSpec, RopeSpec

_GGUF_FAMILIES: dict[Family, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "mixtral": "llama with experts",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2 with sigmoid routing",
}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelSpec:
    """Read GGUF key-value pairs; the file's tensor names tell of biases and an untied head.

    Mistral comes as ``llama``: GGUF files carry no window for it. Raises ModelLoadError for an architecture or rope
    scaling that is not supported, and for a size that is missing.
    """
    family, values = _gguf_family(metadata)
    hidden, heads = read_size(values, "embedding_length"), read_size(values, "attention.head_count")
    mla = gguf_mla(family, values)
    head_dim = int(values.get("attention.key_length") or hidden // heads)
    if mla is not None:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    num_layers = read_size(values, "block_count")
    gemma = family in ("gemma2", "gemma3")
    vocab: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    rope = _gguf_rope(values, head_dim)
    if mla is not None:
        # YaRN's factor on the angles cancels out: DeepSeek's two mscales are equal.
        rope = replace(rope, attention_factor=1.0 if rope.scaling_type == "yarn" else None)
    return ModelSpec(
        architecture=family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=read_size(values, "feed_forward_length"),
        num_heads=heads,
        num_kv_heads=heads if mla is not None else int(values.get("attention.head_count_kv") or heads),
        head_dim=head_dim,
        vocab_size=int(values.get("vocab_size") or len(vocab)),
        max_position=stretched_context(read_size(values, "context_length"), rope),
        norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=rope,
        rope_sliding=_gguf_sliding_rope(values, head_dim) if family == "gemma3" else None,
        layer_windows=_gguf_windows(family, values, num_layers),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=family in ("qwen2", "qwen2_moe") or "blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family in QK_NORM,
        qk_norm_whole=family == "olmoe",
        qkv_clip=values.get("attention.clamp_kqv") if family == "olmoe" else None,
        # The converter has added Gemma's one to its norm weights.
        norm_plus_one=False,
        sandwich_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scale=_gguf_query_size(family, values, head_dim) ** -0.5
        if mla is None
        else gguf_mla_query_scale(values, mla),
        attention_softcap=values.get("attn_logit_softcapping") if gemma else None,
        logit_softcap=values.get("final_logit_softcapping") if gemma else None,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_gguf_ends(metadata, vocab),
        moe=gguf_moe(family, values),
        mla=mla,
    )


def _gguf_family(metadata: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family, and its keys without their prefix."""
    architecture = str(metadata.get("general.architecture") or "")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    name = gguf_family(architecture, values)
    for family in _GGUF_FAMILIES:
        if family == name:
            return family, values
    raise unsupported(architecture, _GGUF_FAMILIES.values())


def _gguf_ends(metadata: Mapping[str, Any], vocab: Sequence[str]) -> tuple[int, ...]:
    """The end token, the end of turn, and turns' ends that older files do not name."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return token_ids(*named, [vocab.index(token) for token in _END_OF_TURN if token in vocab])


def _gguf_query_size(family: Family, values: Mapping[str, Any], head_dim: int) -> float:
    """Gemma's 27B models scale queries by hidden / heads; files do not say so, llama.cpp goes by the layers too."""
    if (family, values["block_count"]) in (("gemma2", 46), ("gemma3", 62)):
        return values["embedding_length"] / values["attention.head_count"]
    return head_dim


def _gguf_windows(family: Family, values: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = values.get("attention.sliding_window")
    if family not in ("gemma2", "gemma3") or not window:
        return (None,) * num_layers
    pattern = values.get("attention.sliding_window_pattern") or {"gemma2": 2, "gemma3": 6}[family]
    if isinstance(pattern, int):
        return tuple(int(window) if (layer + 1) % pattern else None for layer in range(num_layers))
    return tuple(int(window) if slides else None for slides in cast("list[bool]", pattern))


def _gguf_rope(values: Mapping[str, Any], head_dim: int) -> RopeSpec:
    scaling = str(values.get("rope.scaling.type") or "none")
    if scaling not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"rope scaling {scaling} is not supported in GGUF files (none, linear, yarn are)")
    factor = float(values.get("rope.scaling.factor") or 1.0)
    attention = float(values.get("rope.scaling.attn_factor") or 1.0) * (0.1 * log(factor) + 1.0)
    return RopeSpec(
        theta=float(values.get("rope.freq_base") or 10000.0),
        rotary_dim=int(values.get("rope.dimension_count") or head_dim),
        scaling_type="default" if scaling == "none" else ROPE_SCALINGS[scaling],
        factor=factor,
        original_max_position=int(values.get("rope.scaling.original_context_length") or values["context_length"]),
        attention_factor=attention if scaling == "yarn" else None,
        beta_fast=float(values.get("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(values.get("rope.scaling.yarn_beta_slow") or 1.0),
    )


def _gguf_sliding_rope(values: Mapping[str, Any], head_dim: int) -> RopeSpec:
    return RopeSpec(theta=float(values.get("rope.freq_base_swa") or 10000.0), rotary_dim=head_dim)
