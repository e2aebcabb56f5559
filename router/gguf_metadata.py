"""Reads the key-value header of a GGUF file without touching its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). The ``gguf``
package reads the same, but makes a numpy view per string: seconds for a large vocabulary, where this takes a fraction.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..cluster.errors import ModelLoadError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Values of the keys that are ``wanted``; arrays are lists. Raises ModelLoadError when it is no GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata(wanted)
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, _num_tensors, num_keys = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._unpack("<I")[0])
            if wanted(key):
                values[key] = value
        return values

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
