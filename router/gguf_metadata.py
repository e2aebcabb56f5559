"""Reads the header of a GGUF file, key-value pairs and the places of tensors, without touching the tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). The ``gguf``
package reads the same, but makes a numpy view per string: seconds for a large vocabulary, where this takes a fraction.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cluster.damaged import MISTAKES
from ..cluster.errors import ModelLoadError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is."""

    shape: tuple[int, ...]
    """Slowest dimension first, as in torch; the file has it the other way round."""
    storage: int
    """ggml's number of the data type."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All that stands before the tensors' data."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Values of the keys that are ``wanted``; arrays are lists. Raises ModelLoadError when it is no GGUF file."""
    return read_gguf_header(path, wanted).metadata


def read_gguf_header(path: Path, wanted: Callable[[str], bool] = lambda key: True) -> GgufHeader:
    """Metadata of the ``wanted`` keys, and every tensor's place. Raises ModelLoadError when it is no GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header(wanted)
    except (OSError, struct.error, *MISTAKES) as error:
        raise ModelLoadError(f"{path}: cannot be read as GGUF: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self, wanted: Callable[[str], bool]) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, num_tensors, num_keys = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        values: dict[str, Any] = {}
        alignment = _ALIGNMENT
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._unpack("<I")[0])
            if wanted(key):
                values[key] = value
            if key == "general.alignment":
                alignment = int(value)
        return GgufHeader(values, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = self._string()
            (num_dims,) = self._unpack("<I")
            sizes = self._unpack(f"<{num_dims}Q")
            storage, offset = self._unpack("<IQ")
            found.append((name, tuple(reversed(sizes)), storage, offset))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        return {name: GgufTensor(shape, storage, start + offset) for name, shape, storage, offset in found}

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        self._at += size
        return self._data[self._at - size : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(*self._unpack("<IQ"))
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, kind: int, size: int) -> list[Any]:
        if kind in _SCALARS:
            return list(self._unpack(f"<{size}{_SCALARS[kind]}"))
        return [self._value(kind) for _ in range(size)]
