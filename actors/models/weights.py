"""Where a decoder's tensors come from: one protocol over file formats, and the checked way to read it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from ...cluster.errors import ModelLoadError
from ...cluster.quantization_config import QuantizationConfig
from ..layers.grouped import GroupedWeight
from .tensors import Part, Shape

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), counted as float32."""

CODES = -1
"""Stands for GPTQ's and AWQ's codes among the numbers of block formats."""


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

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A tensor, or only the part of it, in a float dtype, dequantised.

        Raises ModelLoadError for a storage type that is not known.
        """
        ...

    def block_type(self, name: str) -> int | None:
        """Ggml's number of the block format in which a tensor is stored, ``CODES``, or None for plain floats."""
        ...

    def read_blocks(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """The blocks themselves: uint8 [rows, bytes of a row], rows in the order of ``read``; None if they are torn."""
        ...

    @property
    def quantization(self) -> QuantizationConfig | None:
        """How GPTQ or AWQ has quantised it, if one has."""
        ...

    def read_grouped(self, name: str, part: Part | None = None) -> GroupedWeight | None:
        """The codes of a tensor that is stored as ``quantization`` says; None of others. Raises ModelLoadError."""
        ...


class Weights:
    """The wanted tensors of a source, or parts of them: all are checked before the first is read.

    Raises ModelLoadError for a tensor that is missing or has another shape.
    """

    def __init__(
        self,
        source: WeightSource,
        wanted: Mapping[str, Shape],
        progress: Progress | None = None,
        parts: Mapping[str, Part] | None = None,
        *,
        must_be_finite: bool = False,
    ) -> None:
        """``wanted`` are the shapes of whole tensors, of which ``parts`` are read (default: all).

        ``must_be_finite``: ``take`` raises ModelLoadError for a tensor with an infinite value or one that is no number.
        """
        self._source = source
        self._must_be_finite = must_be_finite
        self._parts = parts or {}
        self._shapes = {name: self._held(name, shape) for name, shape in wanted.items()}
        self._progress = progress
        self._done = 0
        self._counted: set[str] = set()
        self._total = 4 * sum(map(_size, self._shapes.values()))
        for name, shape in wanted.items():
            _check(source, name, shape)

    @property
    def source(self) -> WeightSource:
        """The checkpoint."""
        return self._source

    def __contains__(self, name: str) -> bool:
        """Whether the tensor is wanted."""
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        """Of what ``take`` gives."""
        return self._shapes[name]

    def take(self, name: str) -> torch.Tensor:
        """A wanted tensor, or the part of it, in the dtype it is stored in (float32 if quantised)."""
        tensor = self._source.read(name, self._parts.get(name))
        if self._must_be_finite and not tensor.isfinite().all():
            raise ModelLoadError(f"{self._source.where(name)}: tensor {name} has values that are not finite")
        self.skip(name)
        return tensor

    def take_optional(self, name: str) -> torch.Tensor | None:
        """The same, or None if the model has no such tensor (a bias, a norm)."""
        return self.take(name) if name in self else None

    def take_blocks(self, name: str) -> torch.Tensor | None:
        """A wanted tensor as ``WeightSource.read_blocks`` gives it."""
        blocks = self._source.read_blocks(name, self._parts.get(name))
        if blocks is not None:
            self.skip(name)
        return blocks

    def take_grouped(self, name: str) -> GroupedWeight | None:
        """A wanted tensor as ``WeightSource.read_grouped`` gives it."""
        grouped = self._source.read_grouped(name, self._parts.get(name))
        if grouped is not None:
            self.skip(name)
        return grouped

    def skip(self, name: str) -> None:
        """Count a wanted tensor as done, once."""
        if name not in self or name in self._counted:
            return
        self._counted.add(name)
        self._done += 4 * _size(self._shapes[name])
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _held(self, name: str, shape: Shape) -> Shape:
        part = self._parts.get(name)
        return shape if part is None else tuple(map(len, part))


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _check(source: WeightSource, name: str, shape: Shape) -> None:
    found = source.shape(name)
    if found is None:
        raise ModelLoadError(f"{source.where(name)}: tensor {name} is missing, expected shape {list(shape)}")
    if found != shape:
        raise ModelLoadError(f"{source.where(name)}: tensor {name} has shape {list(found)}, expected {list(shape)}")
