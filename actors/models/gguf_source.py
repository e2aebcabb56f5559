"""Checkpoints in GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), dequantised on read."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Storage

from ...cluster.errors import ModelLoadError
from ...router.gguf_metadata import read_gguf_header
from .gguf_names import expert_index, gguf_name, has_sandwich_norms, latent_halves
from .tensors import Part, Shape, slices

_READABLE = (
    Storage.F32,
    Storage.F16,
    Storage.BF16,
    Storage.Q8_0,
    Storage.Q4_0,
    Storage.Q4_1,
    Storage.Q4_K,
    Storage.Q5_K,
    Storage.Q6_K,
)
_FLOATS = {Storage.F32: torch.float32, Storage.F16: torch.float16, Storage.BF16: torch.bfloat16}
_PERMUTED = ("attn_q.", "attn_k.")
_ROW = "shared_expert_gate.weight"
"""Files hold this matrix of one row as a vector."""


class GgufSource:
    """A memory-mapped GGUF file. Raises ModelLoadError if it is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_gguf_header(path)
        self._metadata = header.metadata
        self._tensors = header.tensors
        self._data = numpy.memmap(path, mode="r")
        self._sandwich = has_sandwich_norms(self._tensors)
        self._architecture = str(self._field("general.architecture"))

    @property
    def dtype(self) -> torch.dtype:
        """See ``WeightSource.dtype``."""
        return _FLOATS.get(Storage(self._tensors["blk.0.attn_output.weight"].storage), torch.float16)

    @property
    def files(self) -> tuple[Path, ...]:
        """See ``WeightSource.files``."""
        return (self._path,)

    def where(self, name: str) -> str:
        """See ``WeightSource.where``."""
        return f"{self._path} ({self._stored(name)})"

    def shape(self, name: str) -> Shape | None:
        """See ``WeightSource.shape``."""
        if (halves := self._split(name)) is not None:
            (heads, rank, keys), (_, values, _) = (self._tensors[self._stored(half)].shape for half in halves)
            return heads * (keys + values), rank
        if self._stored(name) not in self._tensors:
            return None
        shape, expert = self._tensors[self._stored(name)].shape, expert_index(name)
        if expert is not None:
            return shape[1:] if expert < shape[0] else None
        return (1, *shape) if name.endswith(_ROW) and len(shape) == 1 else shape

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """See ``WeightSource.read``."""
        if (halves := self._split(name)) is not None:
            keys, values = map(self.read, halves)
            whole = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
            return whole if part is None else whole[slices(part)]
        self.block_type(name)
        return self._in_our_order(torch.from_numpy(self._values(name, part)), self._stored(name))

    def block_type(self, name: str) -> int | None:
        """See ``WeightSource.block_type``. Raises ModelLoadError for a format that cannot be read."""
        storage = self._tensors[self._stored(name)].storage
        if storage not in _READABLE:
            raise ModelLoadError(
                f"{self.where(name)}: tensor {name} is stored as {_storage_name(storage)}, "
                f"expected one of {', '.join(readable.name for readable in _READABLE)}"
            )
        return None if storage in _FLOATS else storage

    def read_blocks(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """See ``WeightSource.read_blocks``."""
        blocks = self._bytes(name, part or self._whole(name))
        return None if blocks is None else self._in_our_order(torch.from_numpy(blocks.copy()), self._stored(name))

    @property
    def quantization(self) -> None:
        """See ``WeightSource.quantization``: blocks are a matter of each tensor."""

    def read_grouped(self, name: str, part: Part | None = None) -> None:
        """See ``WeightSource.read_grouped``."""

    def _values(self, name: str, part: Part | None) -> numpy.ndarray:
        """Values of a part as floats, writable."""
        whole, storage = self._whole(name), Storage(self._tensors[self._stored(name)].storage)
        part = part or whole
        data, inner = self._bytes(name, part), ()
        if data is None:
            data, inner = self._bytes(name, (*part[:-1], whole[-1])), slices(part[-1:])
        values = gguf.dequantize(numpy.ascontiguousarray(data), storage)
        return numpy.require(values[(..., *inner)], requirements=["C", "W"])

    def _bytes(self, name: str, part: Part) -> numpy.ndarray | None:
        """[..., bytes of a row] uint8, a view of the file; None if the part tears blocks."""
        stored, expert = self._stored(name), expert_index(name)
        tensor = self._tensors[stored]
        storage = Storage(tensor.storage)
        block, block_bytes = gguf.GGML_QUANT_SIZES[storage]
        rows = gguf.quant_shape_to_byte_shape(tensor.shape, storage)
        data = self._data[tensor.offset : tensor.offset + math.prod(rows)]
        if data.size != math.prod(rows):
            raise ModelLoadError(f"{self._path}: ends inside the tensor {stored}")
        columns = part[-1]
        if columns.start % block or columns.stop % block:
            return None
        inner = slice(columns.start // block * block_bytes, columns.stop // block * block_bytes)
        if expert is not None:
            data, rows = data.reshape(rows)[expert], rows[1:]
        elif len(part) > len(rows):
            rows = (1, *rows)
        return data.reshape(rows)[(*slices(part[:-1]), inner)]

    def _whole(self, name: str) -> Part:
        return tuple(map(range, self.shape(name) or ()))

    def _in_our_order(self, weight: torch.Tensor, stored: str) -> torch.Tensor:
        """Rows of a head as halves: the converter of llama files interleaves them for ggml's rotary kernel."""
        if self._architecture != "llama" or not any(part in stored for part in _PERMUTED):
            return weight
        is_query = "attn_q." in stored
        heads = self._field("llama.attention.head_count")
        if not is_query:
            heads = self._field("llama.attention.head_count_kv", heads)
        half = self._tensors[stored].shape[0] // int(heads) // 2  # a part has whole heads, but not all of them
        return weight.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2)

    def _field(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)

    def _split(self, name: str) -> tuple[str, str] | None:
        """The two tensors in which the file holds this one, if it does so."""
        halves = latent_halves(name)
        is_split = halves is not None and all(self._stored(half) in self._tensors for half in halves)
        return halves if is_split else None

    def _stored(self, name: str) -> str:
        return gguf_name(name, sandwich=self._sandwich)


def _storage_name(storage: int) -> str:
    return Storage(storage).name if storage in list(Storage) else f"type {storage}"
