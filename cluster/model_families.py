"""The families of models."""

from collections.abc import Collection

from .errors import ModelLoadError
from .model_spec import Architecture

DESCRIBED: tuple[Architecture, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
)
"""The families whose configuration is understood. The decoder runs them all."""
IN_GGUF: tuple[Architecture, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
)
"""Those that are read from GGUF files too."""

QK_NORM: tuple[Architecture, ...] = ("qwen3", "gemma3", "qwen3_moe", "olmoe")
"""The families that normalise queries and keys."""


def unsupported(name: str, supported: Collection[str]) -> ModelLoadError:
    return ModelLoadError(f"architecture {name or '(none)'} is not supported; supported: {', '.join(supported)}")
