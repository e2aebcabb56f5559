"""Whether the facts of a model fit together: what layers, kernels and plans take for granted."""

from collections.abc import Iterator
from dataclasses import fields
from math import isfinite
from typing import Any

from .errors import ModelLoadError
from .model_config_values import MOST
from .model_spec import MlaSpec, ModelSpec, MoeSpec, RopeSpec

MOST_EXPERTS = 2**17
"""Of all layers together: each is three tensors to look for."""
_MAY_BE_ZERO = frozenset(("beta_slow", "bos_token_id", "shared_intermediate_size", "truncate"))
_TEXTS = frozenset(("architecture", "activation", "scaling_type", "scoring"))
_SIGNED = frozenset(("attention_factor", "query_scale", "routed_scaling_factor"))


def check_spec(spec: ModelSpec) -> ModelSpec:
    """``spec`` itself. Raises ModelLoadError that names what cannot be."""
    problem = next(_problems(spec), None)
    if problem is not None:
        raise ModelLoadError(f"the model's configuration cannot be: {problem}")
    return spec


def _problems(spec: ModelSpec) -> Iterator[str]:
    for part in (spec, spec.rope, spec.rope_sliding, spec.moe, spec.mla):
        if part is not None:
            yield from _wrong_numbers(part)
    if spec.num_heads % spec.num_kv_heads:
        yield f"{spec.num_heads} heads over {spec.num_kv_heads} key-value heads"
    if len(spec.layer_windows) != spec.num_layers or any(w is not None and w < 1 for w in spec.layer_windows):
        yield f"windows {spec.layer_windows[:8]} of {spec.num_layers} layers"
    for token_id in spec.eos_token_ids:
        if type(token_id) is not int or not 0 <= token_id <= MOST:
            yield f"end token {token_id!r:.40}"
    rotated = spec.head_dim if spec.mla is None else spec.mla.qk_rope_head_dim
    for rope in (spec.rope, spec.rope_sliding):
        if rope is not None and (rope.rotary_dim > rotated or rope.rotary_dim % 2):
            yield f"{rope.rotary_dim} rotated elements of {rotated}"
    if spec.moe is not None:
        yield from _wrong_experts(spec.moe, spec.num_layers)


def _wrong_numbers(part: ModelSpec | RopeSpec | MoeSpec | MlaSpec) -> Iterator[str]:
    """Sizes and factors are positive and finite."""
    for field in fields(part):
        value: Any = getattr(part, field.name)
        if value is None or field.name in _TEXTS or isinstance(value, (tuple, bool, RopeSpec, MoeSpec, MlaSpec)):
            continue
        number = isinstance(value, (int, float)) and isfinite(value) and value <= MOST
        if not number or (value < 0 and field.name not in _SIGNED) or (value == 0 and field.name not in _MAY_BE_ZERO):
            yield f"{field.name} {value!r:.40}"


def _wrong_experts(moe: MoeSpec, num_layers: int) -> Iterator[str]:
    if moe.experts_per_token > moe.num_experts:
        yield f"{moe.experts_per_token} of {moe.num_experts} experts for each token"
    if len(moe.sparse_layers) != num_layers or moe.num_experts * num_layers > MOST_EXPERTS:
        yield f"{moe.num_experts} experts in each of {num_layers} layers"
    if moe.num_experts % moe.n_group or not 1 <= moe.topk_group <= moe.n_group:
        yield f"{moe.topk_group} of {moe.n_group} groups of {moe.num_experts} experts"
    elif moe.experts_per_token > moe.num_experts // moe.n_group * moe.topk_group:
        yield f"{moe.experts_per_token} experts for each token from {moe.topk_group} groups"
