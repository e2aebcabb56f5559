"""What readers of configurations share about the families of models."""

from collections.abc import Collection

from .errors import ModelLoadError
from .model_spec import Architecture

QK_NORM: tuple[Architecture, ...] = ("qwen3", "gemma3", "qwen3_moe", "olmoe")
"""The families that normalise queries and keys."""


def unsupported(name: str, supported: Collection[str]) -> ModelLoadError:
    return ModelLoadError(f"architecture {name or '(none)'} is not supported; supported: {', '.join(supported)}")
