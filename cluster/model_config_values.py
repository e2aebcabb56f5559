"""What the readers of models' configurations share."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .errors import ModelLoadError
from .model_spec import RopeSpec

ROPE_SCALINGS: dict[str, Literal["default", "linear", "dynamic", "llama3", "yarn"]] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
}

MOST = 2**31 - 1
"""Of any size: what an int32 holds."""
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "block_count"), 1024),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "expert_count"), 4096),
}
"""Of what lists are made of: no model is near these."""


def read_size(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or not 1 <= value <= _MOST_OF.get(key, MOST):
        raise ModelLoadError(f"the model's configuration has no {key}" if value is None else f"{key} is {value!r:.40}")
    return value


def token_ids(*values: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids of all values, each once, in order."""
    ids: dict[int, None] = {}
    for value in values:
        if value is not None:
            ids |= dict.fromkeys([value] if isinstance(value, int) else value)
    return tuple(ids)


def stretched_context(max_position: int, rope: RopeSpec) -> int:
    """Context with the scalings that keep the trained length in the configuration."""
    if rope.scaling_type in ("yarn", "dynamic"):
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
