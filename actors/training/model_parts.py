"""Single tensors of a model, for what starts as a part of it."""

from pathlib import Path

import torch

from ...cluster.model_tensors import EMBEDDING, HEAD
from ..models.gguf_source import GgufSource
from ..models.safetensors_source import SafetensorsSource
from ..models.spec import is_gguf, read_spec
from ..models.weights import WeightSource


def weight_source(path: Path) -> WeightSource:
    """Of a folder or a GGUF file. Raises ModelLoadError."""
    return GgufSource(path) if is_gguf(path) else SafetensorsSource(path)


def head_rows(path: Path, token_ids: torch.Tensor) -> torch.Tensor:
    """[len(token_ids), hidden] float32: the model's own output rows of those tokens."""
    name = EMBEDDING if read_spec(path).tie_embeddings else HEAD
    return weight_source(path).read(name)[token_ids].float()


def embedding_table(path: Path) -> torch.Tensor:
    """[vocab, hidden]."""
    return weight_source(path).read(EMBEDDING)
