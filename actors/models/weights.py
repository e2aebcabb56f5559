"""Where a decoder's tensors come from: one protocol over file formats, and the checked way to read it."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ...cluster.errors import ModelLoadError
from .tensors import Shape

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), counted as float32."""


class WeightSource(Protocol):
    """A checkpoint. Names are Hugging Face's."""

    @property
    def dtype(self) -> torch.dtype:
        """Float dtype of most of the checkpoint's weights; float16 where they are quantised."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the checkpoint."""
        ...

    def where(self, name: str) -> str:
        """The file that should hold a tensor, for messages."""
        ...

    def shape(self, name: str) -> Shape | None:
        """Shape of a tensor; None if there is none of that name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor of a float dtype, dequantised. Raises ModelLoadError for a storage type that is not known."""
        ...

    def block_type(self, name: str) -> int | None:
        """Ggml's number of the block format in which a tensor is stored; None for plain floats."""
        ...

    def read_blocks(self, name: str) -> torch.Tensor:
        """The blocks themselves: uint8 [rows, bytes of a row], rows in the order of ``read``."""
        ...


class Weights:
    """The wanted tensors of a source: all are checked before the first is read.

    Raises ModelLoadError for a tensor that is missing or has another shape.
    """

    def __init__(self, source: WeightSource, wanted: dict[str, Shape], progress: Progress | None = None) -> None:
        self._source = source
        self._wanted = wanted
        self._progress = progress
        self._done = 0
        self._counted: set[str] = set()
        self._total = 4 * sum(_size(shape) for shape in wanted.values())
        for name, shape in wanted.items():
            _check(source, name, shape)

    @property
    def source(self) -> WeightSource:
        """The checkpoint."""
        return self._source

    def take(self, name: str) -> torch.Tensor:
        """A wanted tensor in the dtype it is stored in (float32 if quantised)."""
        tensor = self._source.read(name)
        self.skip(name)
        return tensor

    def take_optional(self, name: str) -> torch.Tensor | None:
        """The same, or None if the model has no such tensor (a bias, a norm)."""
        return self.take(name) if name in self._wanted else None

    def take_blocks(self, name: str) -> torch.Tensor:
        """A wanted tensor as ``WeightSource.read_blocks`` gives it."""
        blocks = self._source.read_blocks(name)
        self.skip(name)
        return blocks

    def skip(self, name: str) -> None:
        """Count a wanted tensor as done, once."""
        if name not in self._wanted or name in self._counted:
            return
        self._counted.add(name)
        self._done += 4 * _size(self._wanted[name])
        if self._progress is not None:
            self._progress(self._done, self._total)


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _check(source: WeightSource, name: str, shape: Shape) -> None:
    found = source.shape(name)
    if found is None:
        raise ModelLoadError(f"{source.where(name)}: tensor {name} is missing, expected shape {list(shape)}")
    if found != shape:
        raise ModelLoadError(f"{source.where(name)}: tensor {name} has shape {list(found)}, expected {list(shape)}")
