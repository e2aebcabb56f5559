"""The families of models: those that the decoder runs, and those whose configuration is understood."""

from collections.abc import Collection

from .errors import ModelLoadError
from .model_spec import Architecture

DENSE: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
"""Families without experts: those that are read from GGUF files, which stack a layer's experts in one tensor."""
SERVED: tuple[Architecture, ...] = (*DENSE, "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""The families that the decoder runs. All others are refused when a model is read, unless one asks for DESCRIBED."""
DESCRIBED: tuple[Architecture, ...] = (
    *SERVED,
    "deepseek_v2",
    "deepseek_v3",
)
"""The families whose configuration is understood."""

QK_NORM: tuple[Architecture, ...] = ("qwen3", "gemma3", "qwen3_moe", "olmoe")
"""The families that normalise queries and keys."""


def unsupported(name: str, supported: Collection[str]) -> ModelLoadError:
    return ModelLoadError(f"architecture {name or '(none)'} is not supported; supported: {', '.join(supported)}")
