"""Weights that lie in no file: tensors by Hugging Face's names, fetched one by one when they are wanted."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...cluster.errors import ModelLoadError
from ...cluster.quantization_config import QuantizationConfig
from ..layers.grouped import GroupedWeight
from .tensors import Part, Shape, slices

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TensorSource:
    """``WeightSource`` over a function. Only one tensor at a time is fetched, and nothing of it is kept."""

    files: tuple[Path, ...] = ()
    quantization: QuantizationConfig | None = None

    def __init__(
        self, described: Mapping[str, tuple[Shape, str]], fetch: Callable[[str], torch.Tensor], origin: str
    ) -> None:
        """``described``: shape and dtype of every tensor; ``fetch`` gives one whole; ``origin``: for messages.

        Raises ModelLoadError where there are none, or one is not of floats.
        """
        for name, (_, dtype) in described.items():
            if dtype not in FLOATS:
                raise ModelLoadError(f"{origin}: tensor {name} has {dtype}, expected one of {', '.join(FLOATS)}")
        if not described:
            raise ModelLoadError(f"{origin} has no tensors")
        self._described = described
        self._fetch = fetch
        self._origin = origin

    @property
    def dtype(self) -> torch.dtype:
        """See ``WeightSource.dtype``."""
        [(name, _)] = Counter(dtype for _, dtype in self._described.values()).most_common(1)
        return FLOATS[name]

    def where(self, name: str) -> str:
        """See ``WeightSource.where``."""
        return self._origin

    def shape(self, name: str) -> Shape | None:
        """See ``WeightSource.shape``."""
        found = self._described.get(name)
        return None if found is None else tuple(found[0])

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """See ``WeightSource.read``. Raises ModelLoadError where the tensor is not what it was said to be."""
        shape, dtype = self._described[name]
        tensor = self._fetch(name)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != FLOATS[dtype]:
            raise ModelLoadError(
                f"{self._origin}: tensor {name} came as {list(tensor.shape)} {tensor.dtype}, not {list(shape)} {dtype}"
            )
        return tensor if part is None else tensor[slices(part)]

    def block_type(self, name: str) -> int | None:
        """See ``WeightSource.block_type``."""
        return None

    def read_blocks(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """See ``WeightSource.read_blocks``."""
        raise ModelLoadError(f"{self._origin}: tensor {name} is not stored in blocks")

    def read_grouped(self, name: str, part: Part | None = None) -> GroupedWeight | None:
        """See ``WeightSource.read_grouped``."""
        return None
