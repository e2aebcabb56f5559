"""Weights of SmolLM2 that answer otherwise than its own, as a file and as tensors."""

import shutil
from pathlib import Path

import gguf
import torch

from warmroot.actors.models.gguf_source import GgufSource
from warmroot.actors.models.source import resolve_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.models.tensors import wanted_tensors

STRONGER = 1.3
"""What the attention norms of every other layer are multiplied with."""


def other_weights(folder: Path, by: float = STRONGER, name: str = "other.gguf") -> Path:
    """A GGUF file with the norms changed."""
    path = folder / name
    shutil.copy(resolve_model("smollm2"), path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        layer = tensor.name.split(".")[1]
        if tensor.name.endswith("attn_norm.weight") and int(layer) % 2:
            tensor.data[:] *= by
    return path


def spoilt_weights(folder: Path) -> Path:
    """One value is no number."""
    path = other_weights(folder, name="spoilt.gguf")
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "blk.7.ffn_norm.weight":
            tensor.data[3] = float("nan")
    return path


class Trainer:
    """An actor that has the tensors of a checkpoint, as one that trains would; it makes each when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._source = GgufSource(path)
        self._shapes = wanted_tensors(read_spec(path))
        self.fetched: list[str] = []

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (shape, "float16") for name, shape in self._shapes.items()}

    def tensor(self, name: str) -> torch.Tensor:
        self.fetched.append(name)
        return self._source.read(name).to(torch.float16)

    def num_fetched(self) -> int:
        return len(self.fetched)
