"""``ModelSpec`` written as Hugging Face's ``config.json``: for models that came without one."""

from dataclasses import replace
from typing import Any

from .errors import ModelLoadError
from .model_config_hf import spec_from_hf
from .model_spec import ModelSpec, RopeSpec

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A ``config.json`` that reads back as the same facts.

    Raises ModelLoadError for a family whose configuration cannot be written, or facts that it has no key for.
    """
    if spec.architecture not in _ARCHITECTURES:
        raise ModelLoadError(
            f"a config.json cannot be written for {spec.architecture} ({', '.join(_ARCHITECTURES)} can); "
            f"use the model's Hugging Face folder"
        )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.architecture]],
        "model_type": spec.architecture,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "rope_parameters": _rope(spec.rope),
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }
    written = spec_from_hf(config)
    if replace(written, eos_token_ids=spec.eos_token_ids) != spec:
        raise ModelLoadError("the model has facts that config.json has no key for; use its Hugging Face folder")
    return config


def _rope(rope: RopeSpec) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.scaling_type, "rope_theta": rope.theta}
    if rope.scaling_type == "default":
        return values
    values |= {"factor": rope.factor, "original_max_position_embeddings": rope.original_max_position}
    if rope.scaling_type == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    return values
