"""Model facts out of a checkpoint's own description: Hugging Face's ``config.json`` and GGUF metadata.

Pure: dictionaries in, ``ModelSpec`` out. What a family's configuration leaves unsaid stands in the tables below.
"""

from collections.abc import Collection, Mapping, Sequence
from math import log
from typing import Any, Literal, cast

from .errors import ModelLoadError
from .model_spec import ModelSpec, RopeSpec

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]

_HF_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_MODEL_TYPES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
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
}
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SCALINGS: dict[str, Literal["default", "linear", "dynamic", "llama3", "yarn"]] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
}
_NO_VALUES: Mapping[str, Any] = {}


def spec_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] = _NO_VALUES) -> ModelSpec:
    """Read ``config.json`` (as transformers 4 or 5 writes it) and, for end tokens, ``generation_config.json``.

    Raises ModelLoadError for an architecture, activation, rope scaling or layer type that is not supported, and for
    a size that is missing.
    """
    family = _hf_family(config)
    # An explicit null stands: it switches a window or a softcap off.
    values: dict[str, Any] = _HF_DEFAULTS[family] | dict(config) | dict(config.get("text_config") or {})
    hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    head_dim = int(values.get("head_dim") or hidden // heads)
    gemma = family in ("gemma2", "gemma3")
    windows = _hf_windows(family, values)
    rope = _hf_rope(values, "full_attention", head_dim)
    bias = family != "mistral" and bool(values.get("attention_bias"))
    return ModelSpec(
        architecture=family,
        num_layers=len(windows),
        hidden_size=hidden,
        intermediate_size=_size(values, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=_size(values, "vocab_size"),
        max_position=_stretched(_size(values, "max_position_embeddings"), rope),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        rope_sliding=_hf_sliding_rope(values, head_dim) if family == "gemma3" else None,
        layer_windows=windows,
        tie_embeddings=bool(values.get("tie_word_embeddings")),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(values.get("mlp_bias")),
        qk_norm=family in ("qwen3", "gemma3"),
        norm_plus_one=gemma,
        sandwich_norms=gemma,
        activation=_activation(values),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scale=float(values["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        attention_softcap=values.get("attn_logit_softcapping") if gemma else None,
        logit_softcap=values.get("final_logit_softcapping") if gemma else None,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=_ids(generation.get("eos_token_id"), values.get("eos_token_id")),
    )


def _hf_family(config: Mapping[str, Any]) -> Family:
    names: list[str] = config.get("architectures") or []
    for name in names:
        if name in _HF_FAMILIES:
            return _HF_FAMILIES[name]
    model_type = str(config.get("model_type", ""))
    if not names and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    raise _unsupported(", ".join(names) or model_type, _HF_FAMILIES)


def _hf_windows(family: Family, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer. ``sliding_window`` W masks keys at and before position - W: W keys, itself included."""
    num_layers = _size(values, "num_hidden_layers")
    window = values.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    if family in ("qwen2", "qwen3") and not values.get("use_sliding_window"):
        return (None,) * num_layers
    kinds = values.get("layer_types") or _hf_layer_types(family, values, num_layers)
    return tuple(int(window) if _slides(kind) else None for kind in kinds)


def _hf_layer_types(family: Family, values: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    if family in ("gemma2", "gemma3"):
        # Every pattern-th layer sees everything.
        pattern = int(values["sliding_window_pattern"])
        return [kinds[(layer + 1) % pattern != 0] for layer in range(num_layers)]
    first = int(values.get("max_window_layers", 28))
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
    if scaling not in _SCALINGS:
        raise ModelLoadError(f"rope scaling {scaling} is not supported ({', '.join(_SCALINGS)} are)")
    trained = _size(values, "max_position_embeddings")
    original = int(rope.get("original_max_position_embeddings", trained))
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    return RopeSpec(
        theta=float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        rotary_dim=int(head_dim * partial),
        scaling_type=_SCALINGS[scaling],
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


def _stretched(max_position: int, rope: RopeSpec) -> int:
    """Context with the scalings that keep the trained length in the configuration."""
    if rope.scaling_type in ("yarn", "dynamic"):
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _activation(values: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"activation {name} is not supported ({', '.join(_ACTIVATIONS)} are)")
    return _ACTIVATIONS[name]


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"the model's configuration has no {key}" if value is None else f"{key} is {value!r}")
    return value


def _ids(*values: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids of all values, each once, in order."""
    ids: dict[int, None] = {}
    for value in values:
        if value is not None:
            ids |= dict.fromkeys([value] if isinstance(value, int) else value)
    return tuple(ids)


def _unsupported(name: str, supported: Collection[str]) -> ModelLoadError:
    return ModelLoadError(f"architecture {name or '(none)'} is not supported; supported: {', '.join(supported)}")


_GGUF_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelSpec:
    """Read GGUF key-value pairs; the file's tensor names tell of biases and an untied head.

    Mistral comes as ``llama``: GGUF files carry no window for it. Raises ModelLoadError for an architecture or rope
    scaling that is not supported, and for a size that is missing.
    """
    family = metadata.get("general.architecture")
    if family not in _GGUF_FAMILIES:
        raise _unsupported(str(family or ""), _GGUF_FAMILIES)
    prefix = f"{family}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    hidden, heads = _size(values, "embedding_length"), _size(values, "attention.head_count")
    head_dim = int(values.get("attention.key_length") or hidden // heads)
    num_layers = _size(values, "block_count")
    gemma = family in ("gemma2", "gemma3")
    vocab: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    rope = _gguf_rope(values, head_dim)
    return ModelSpec(
        architecture=family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_size(values, "feed_forward_length"),
        num_heads=heads,
        num_kv_heads=int(values.get("attention.head_count_kv") or heads),
        head_dim=head_dim,
        vocab_size=int(values.get("vocab_size") or len(vocab)),
        max_position=_stretched(_size(values, "context_length"), rope),
        norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=rope,
        rope_sliding=_gguf_sliding_rope(values, head_dim) if family == "gemma3" else None,
        layer_windows=_gguf_windows(family, values, num_layers),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family in ("qwen3", "gemma3"),
        # The converter has added Gemma's one to its norm weights.
        norm_plus_one=False,
        sandwich_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scale=_gguf_query_size(family, values, head_dim) ** -0.5,
        attention_softcap=values.get("attn_logit_softcapping") if gemma else None,
        logit_softcap=values.get("final_logit_softcapping") if gemma else None,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_gguf_ends(metadata, vocab),
    )


def _gguf_ends(metadata: Mapping[str, Any], vocab: Sequence[str]) -> tuple[int, ...]:
    """The end token, the end of turn, and turns' ends that older files do not name."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return _ids(*named, [vocab.index(token) for token in _END_OF_TURN if token in vocab])


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
        scaling_type="default" if scaling == "none" else _SCALINGS[scaling],
        factor=factor,
        original_max_position=int(values.get("rope.scaling.original_context_length") or values["context_length"]),
        attention_factor=attention if scaling == "yarn" else None,
        beta_fast=float(values.get("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(values.get("rope.scaling.yarn_beta_slow") or 1.0),
    )


def _gguf_sliding_rope(values: Mapping[str, Any], head_dim: int) -> RopeSpec:
    return RopeSpec(theta=float(values.get("rope.freq_base_swa") or 10000.0), rotary_dim=head_dim)
