"""Experts and latent attention out of a checkpoint's own description: see ``model_config``.

Where Hugging Face and GGUF say different things, GGUF's follow llama.cpp, which fixes per family what files leave out.
"""

from collections.abc import Mapping
from math import log
from typing import Any, Literal

from .errors import ModelLoadError
from .model_config_values import read_size
from .model_spec import Architecture, MlaSpec, MoeSpec

MOE_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    "mixtral": {"num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2_moe": {
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
    },
    "qwen3_moe": {
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    "olmoe": {"num_experts_per_tok": 8},
    "deepseek_v2": {
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "deepseek_v3": {
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
"""What transformers assumes for keys that a file leaves out; the number of experts is always there."""


def hf_moe(family: Architecture, values: Mapping[str, Any]) -> MoeSpec | None:
    """The experts of a ``config.json``; None for families without. Raises ModelLoadError."""
    if family in ("mixtral", "olmoe"):
        mixtral = family == "mixtral"
        return MoeSpec(
            num_experts=_either(values, "num_local_experts", "num_experts"),
            experts_per_token=read_size(values, "num_experts_per_tok"),
            intermediate_size=read_size(values, "intermediate_size"),
            sparse_layers=(True,) * read_size(values, "num_hidden_layers"),
            norm_topk_prob=mixtral or bool(values.get("norm_topk_prob")),
        )
    if family in ("qwen2_moe", "qwen3_moe"):
        return MoeSpec(
            num_experts=_either(values, "num_experts", "num_local_experts"),
            experts_per_token=read_size(values, "num_experts_per_tok"),
            intermediate_size=read_size(values, "moe_intermediate_size"),
            sparse_layers=_hf_qwen_layers(values),
            shared_intermediate_size=read_size(values, "shared_expert_intermediate_size")
            if family == "qwen2_moe"
            else 0,
            shared_gate=family == "qwen2_moe",
            norm_topk_prob=bool(values.get("norm_topk_prob")),
        )
    return _hf_deepseek(family, values) if family in ("deepseek_v2", "deepseek_v3") else None


def _hf_qwen_layers(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer, but those in mlp_only_layers."""
    step = int(values.get("decoder_sparse_step") or 1)
    dense: list[int] = values.get("mlp_only_layers") or []
    layers = range(read_size(values, "num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def _hf_deepseek(family: Architecture, values: Mapping[str, Any]) -> MoeSpec:
    v3 = family == "deepseek_v3"
    method = str(values.get("topk_method") or ("noaux_tc" if v3 else "greedy"))
    supported = ["noaux_tc"] if v3 else ["greedy", "group_limited_greedy"]
    if method not in supported:
        raise ModelLoadError(f"topk_method {method} is not supported for {family} ({', '.join(supported)})")
    grouped = method != "greedy"
    num_layers, inner = read_size(values, "num_hidden_layers"), read_size(values, "moe_intermediate_size")
    dense, step = int(values.get("first_k_dense_replace") or 0), int(values.get("moe_layer_freq") or 1)
    return MoeSpec(
        num_experts=_either(values, "n_routed_experts", "num_local_experts", "num_experts"),
        experts_per_token=read_size(values, "num_experts_per_tok"),
        intermediate_size=inner,
        sparse_layers=tuple(layer >= dense and layer % step == 0 for layer in range(num_layers)),
        shared_intermediate_size=inner * int(values.get("n_shared_experts") or 0),
        scoring="sigmoid" if v3 else "softmax",
        norm_topk_prob=v3 and bool(values.get("norm_topk_prob")),
        routed_scaling_factor=float(values.get("routed_scaling_factor", 1.0)),
        n_group=int(values.get("n_group") or 1) if grouped else 1,
        topk_group=int(values.get("topk_group") or 1) if grouped else 1,
        correction_bias=v3,
    )


def hf_mla(family: Architecture, values: Mapping[str, Any]) -> MlaSpec | None:
    """The latent attention of a ``config.json``; None for families without. Raises ModelLoadError."""
    if family not in ("deepseek_v2", "deepseek_v3"):
        return None
    interleave = values.get("rope_interleave")
    return MlaSpec(
        q_lora_rank=values.get("q_lora_rank"),
        kv_lora_rank=read_size(values, "kv_lora_rank"),
        qk_nope_head_dim=read_size(values, "qk_nope_head_dim"),
        qk_rope_head_dim=read_size(values, "qk_rope_head_dim"),
        v_head_dim=read_size(values, "v_head_dim"),
        rope_interleave=family == "deepseek_v2" or interleave is None or bool(interleave),
    )


def hf_mla_query_scale(values: Mapping[str, Any], mla: MlaSpec) -> float:
    """Head size ** -0.5, times the square of YaRN's mscale_all_dim."""
    rope: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not rope.get("mscale_all_dim") or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * float(rope["mscale_all_dim"]) * log(float(rope["factor"])) + 1.0) ** 2


def gguf_family(architecture: str, values: Mapping[str, Any]) -> str:
    """The family of a GGUF architecture: ``llama`` with experts is Mixtral, ``deepseek2`` is V2 or V3 by its router."""
    if architecture == "llama" and values.get("expert_count"):
        return "mixtral"
    if architecture == "deepseek2":
        return "deepseek_v3" if _gguf_scoring(values) == "sigmoid" else "deepseek_v2"
    return {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(architecture, architecture)


def gguf_moe(family: Architecture, values: Mapping[str, Any]) -> MoeSpec | None:
    """The experts of GGUF metadata, keys without the architecture's prefix. Raises ModelLoadError."""
    if not values.get("expert_count"):
        return None
    deepseek = family in ("deepseek_v2", "deepseek_v3")
    dense = int(values.get("leading_dense_block_count") or 0)
    inner = int(values.get("expert_feed_forward_length") or read_size(values, "feed_forward_length"))
    shared = values.get("expert_shared_feed_forward_length") or inner * int(values.get("expert_shared_count") or 0)
    return MoeSpec(
        num_experts=read_size(values, "expert_count"),
        experts_per_token=read_size(values, "expert_used_count"),
        intermediate_size=inner,
        sparse_layers=tuple(layer >= dense for layer in range(read_size(values, "block_count"))),
        shared_intermediate_size=int(shared),
        shared_gate=family == "qwen2_moe",
        scoring=_gguf_scoring(values),
        norm_topk_prob=bool(values.get("expert_weights_norm", family in ("mixtral", "qwen3_moe"))),
        routed_scaling_factor=float(values.get("expert_weights_scale") or 1.0),
        n_group=int(values.get("expert_group_count") or 1) if deepseek else 1,
        topk_group=int(values.get("expert_group_used_count") or 1) if deepseek else 1,
        correction_bias=family == "deepseek_v3",
    )


def gguf_mla(family: Architecture, values: Mapping[str, Any]) -> MlaSpec | None:
    """The latent attention of GGUF metadata; newer files have the heads' sizes under ``_mla``."""
    if family not in ("deepseek_v2", "deepseek_v3"):
        return None
    rotated = read_size(values, "rope.dimension_count")
    suffix = "_mla" if "attention.key_length_mla" in values else ""
    return MlaSpec(
        q_lora_rank=values.get("attention.q_lora_rank") or None,
        kv_lora_rank=read_size(values, "attention.kv_lora_rank"),
        qk_nope_head_dim=read_size(values, f"attention.key_length{suffix}") - rotated,
        qk_rope_head_dim=rotated,
        v_head_dim=read_size(values, f"attention.value_length{suffix}"),
    )


def gguf_mla_query_scale(values: Mapping[str, Any], mla: MlaSpec) -> float:
    """As ``hf_mla_query_scale``; ``yarn_log_multiplier`` is a tenth of mscale_all_dim."""
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
    factor, multiplier = values.get("rope.scaling.factor"), values.get("rope.scaling.yarn_log_multiplier")
    if values.get("rope.scaling.type") != "yarn" or not factor or not multiplier:
        return scale
    return scale * (float(multiplier) * log(float(factor)) + 1.0) ** 2


def _gguf_scoring(values: Mapping[str, Any]) -> Literal["softmax", "sigmoid"]:
    """1 is softmax, 2 sigmoid; DeepSeek-V2 files of old do not say."""
    function = values.get("expert_gating_func") or 1
    if function not in (1, 2):
        raise ModelLoadError(f"expert gating function {function} is not supported (1 softmax and 2 sigmoid are)")
    return "sigmoid" if function == 2 else "softmax"


def _either(values: Mapping[str, Any], *keys: str) -> int:
    """The first key that is there: transformers writes one name or the other."""
    return read_size(values, next((key for key in keys if values.get(key) is not None), keys[0]))
