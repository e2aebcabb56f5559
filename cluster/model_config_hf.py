"""Hugging Face's ``config.json`` read as ``ModelSpec``: see ``model_config``."""

from collections.abc import Mapping
from math import log
from typing import Any, Literal

from .errors import ModelLoadError
from .model_config_moe import MOE_DEFAULTS, hf_mla, hf_mla_query_scale, hf_moe
from .model_config_values import ROPE_SCALINGS, read_size, stretched_context, token_ids
from .model_families import QK_NORM, unsupported
from .model_spec import Architecture as Family
from .model_spec import ModelSpec, RopeSpec

_HF_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
_MODEL_TYPES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    **{family: family for family in MOE_DEFAULTS},
}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_HF_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
    "gemma3": _GEMMA
    | {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
    **MOE_DEFAULTS,
}
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_NO_VALUES: Mapping[str, Any] = {}
_UNWINDOWED: tuple[Family, ...] = ("llama", "olmoe", "deepseek_v2", "deepseek_v3")


def spec_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] = _NO_VALUES) -> ModelSpec:
    """Read ``config.json`` (as transformers 4 or 5 writes it) and, for end tokens, ``generation_config.json``.

    Raises ModelLoadError for an architecture, activation, rope scaling or layer type that is not supported, and for a
    size that is missing.
    """
    family = _hf_family(config)
    # An explicit null stands: it switches a window or a softcap off.
    values: dict[str, Any] = _HF_DEFAULTS[family] | dict(config) | dict(config.get("text_config") or {})
    hidden, heads = read_size(values, "hidden_size"), read_size(values, "num_attention_heads")
    mla = hf_mla(family, values)
    head_dim = int(values.get("head_dim") or hidden // heads)
    if mla is not None:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    gemma = family in ("gemma2", "gemma3")
    windows = _hf_windows(family, values)
    rope = _hf_rope(values, "full_attention", head_dim if mla is None else mla.qk_rope_head_dim)
    qkv_bias, o_bias = _hf_biases(family, values)
    query_scale = float(values["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5
    return ModelSpec(
        architecture=family,
        num_layers=len(windows),
        hidden_size=hidden,
        intermediate_size=read_size(values, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads if mla is not None else int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=read_size(values, "vocab_size"),
        max_position=stretched_context(read_size(values, "max_position_embeddings"), rope),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        rope_sliding=_hf_sliding_rope(values, head_dim) if family == "gemma3" else None,
        layer_windows=windows,
        tie_embeddings=bool(values.get("tie_word_embeddings")),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=family in ("llama", "deepseek_v2") and bool(values.get("mlp_bias")),
        qk_norm=family in QK_NORM,
        qk_norm_whole=family == "olmoe",
        qkv_clip=values.get("clip_qkv") if family == "olmoe" else None,
        norm_plus_one=gemma,
        sandwich_norms=gemma,
        activation=_activation(values),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scale=query_scale if mla is None else hf_mla_query_scale(values, mla),
        attention_softcap=values.get("attn_logit_softcapping") if gemma else None,
        logit_softcap=values.get("final_logit_softcapping") if gemma else None,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=token_ids(generation.get("eos_token_id"), values.get("eos_token_id")),
        moe=hf_moe(family, values),
        mla=mla,
    )


def _hf_family(config: Mapping[str, Any]) -> Family:
    names: list[str] = config.get("architectures") or []
    model_type = str(config.get("model_type", ""))
    known: list[Family | None] = [_HF_FAMILIES.get(name) for name in names] or [_MODEL_TYPES.get(model_type)]
    for family in known:
        if family is not None:
            return family
    raise unsupported(", ".join(names) or model_type, _HF_FAMILIES)


def _hf_biases(family: Family, values: Mapping[str, Any]) -> tuple[bool, bool]:
    """Of query, key and value (with MLA of the projections down from the hidden size), and of the output."""
    if family in ("mistral", "mixtral"):
        return False, False
    if family in ("qwen2", "qwen2_moe"):
        return bool(values.get("qkv_bias", True)) or family == "qwen2", False
    bias = bool(values.get("attention_bias"))
    return bias, bias


def _hf_windows(family: Family, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer. ``sliding_window`` W masks keys at and before position - W: W keys, itself included."""
    num_layers = read_size(values, "num_hidden_layers")
    window = values.get("sliding_window")
    if family in _UNWINDOWED or window is None:
        return (None,) * num_layers
    if family in ("mistral", "mixtral"):
        return (int(window),) * num_layers
    if family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and not values.get("use_sliding_window"):
        return (None,) * num_layers
    if family == "qwen3_moe":
        return (int(window),) * num_layers
    kinds = values.get("layer_types") or _hf_layer_types(family, values, num_layers)
    return tuple(int(window) if _slides(kind) else None for kind in kinds)


def _hf_layer_types(family: Family, values: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    if family in ("gemma2", "gemma3"):
        # Every pattern-th layer sees everything.
        pattern = int(values["sliding_window_pattern"])
        return [kinds[(layer + 1) % pattern != 0] for layer in range(num_layers)]
    first = int(values.get("max_window_layers", 28))
    if family == "qwen2_moe":
        # Every other layer of the first ones: so its configuration class reads these keys.
        return [kinds[layer % 2 == 0 and layer < first] for layer in range(num_layers)]
    return [kinds[layer >= first] for layer in range(num_layers)]


def _slides(kind: str) -> bool:
    if kind not in ("full_attention", "sliding_attention"):
        raise ModelLoadError(f"layer type {kind} is not supported (full_attention, sliding_attention are)")
    return kind == "sliding_attention"


def _hf_rope(values: Mapping[str, Any], kind: str, head_dim: int) -> RopeSpec:
    """Rope of a kind of layer: transformers 5 has ``rope_parameters``, flat or per kind; 4 has two older keys."""
    given: dict[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "full_attention" in given or "sliding_attention" in given:
        given = given.get(kind) or {}
    rope = {key: value for key, value in given.items() if value is not None}
    scaling = str(rope.get("rope_type", rope.get("type", "default")))
    if scaling not in ROPE_SCALINGS:
        raise ModelLoadError(f"rope scaling {scaling} is not supported ({', '.join(ROPE_SCALINGS)} are)")
    trained = read_size(values, "max_position_embeddings")
    original = int(rope.get("original_max_position_embeddings", trained))
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    return RopeSpec(
        theta=float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        rotary_dim=int(head_dim * partial),
        scaling_type=ROPE_SCALINGS[scaling],
        factor=float(rope.get("factor", trained / original)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        # Dynamic scaling counts from the context of the configuration itself.
        original_max_position=trained if scaling == "dynamic" else original,
        attention_factor=_yarn_attention_factor(rope) if scaling == "yarn" else None,
        beta_fast=float(rope.get("beta_fast", 32.0)),
        beta_slow=float(rope.get("beta_slow", 1.0)),
        truncate=bool(rope.get("truncate", True)),
    )


def _hf_sliding_rope(values: Mapping[str, Any], head_dim: int) -> RopeSpec:
    nested: dict[str, Any] = values.get("rope_parameters") or {}
    if "sliding_attention" in nested:
        return _hf_rope({**values, "rope_theta": 10000.0}, "sliding_attention", head_dim)
    return RopeSpec(theta=float(values.get("rope_local_base_freq") or 10000.0), rotary_dim=head_dim)


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float | None:
    """The given factor, or DeepSeek's ratio of two scales; None: the paper's."""
    if "attention_factor" in rope or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return rope.get("attention_factor")
    scales = [0.1 * float(rope[key]) * log(float(rope["factor"])) + 1.0 for key in ("mscale", "mscale_all_dim")]
    return scales[0] / scales[1]


def _activation(values: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"activation {name} is not supported ({', '.join(_ACTIVATIONS)} are)")
    return _ACTIVATIONS[name]
