"""A file of packed weights, mapped into memory as it is.

Layout: blobs aligned to 64 bytes, an index (JSON), a trailer of fixed size. The trailer comes last, so that a file that
was cut short has none, and it holds a digest of the index.
"""

import json
import mmap
import struct
import warnings
from collections.abc import Iterable
from ctypes import ArgumentError
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...cluster.damaged import MISTAKES
from ..kernels.linear import Offsets, PackedWeight, WeightFormat, packed_bytes
from .packing import PackedLinears

_TRAILER = struct.Struct("<16sQQ8s")  # digest of the index, its place, its size, magic
MAGIC = b"WRPACK02"
_ALIGNMENT = 64
_PLAIN = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def write_packed(
    file: BinaryIO, name: str, table: torch.Tensor, linears: Iterable[tuple[str, tuple[PackedWeight, ...]]]
) -> None:
    """Write a model, one linear in memory at a time. Raises OSError."""

    def blob(tensor: torch.Tensor | None) -> list[int] | None:
        if tensor is None:
            return None
        file.write(bytes(-file.tell() % _ALIGNMENT))
        start = file.tell()
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
        return [start, file.tell() - start]

    def entry(part: PackedWeight) -> dict[str, Any]:
        kind = {"format": int(part.format), "offsets": int(part.offsets), "shape": list(part.shape)}
        return {**kind, "data": blob(part.data), "bias": blob(part.bias), "order": blob(part.order)}

    index = {
        "name": name,
        "table": {
            "dtype": str(table.dtype).removeprefix("torch."),
            "shape": list(table.shape),
            "data": blob(table),
        },
        "linears": {key: [entry(part) for part in parts] for key, parts in linears},
    }
    text = json.dumps(index).encode()
    start = file.tell()
    file.write(text)
    file.write(_TRAILER.pack(blake2b(text, digest_size=16).digest(), start, len(text), MAGIC))


def map_packed(path: Path) -> PackedLinears:
    """The weights of a file, read-only and shared with every process that maps it.

    Raises OSError when it cannot be opened, ValueError when it is damaged.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        index = _read_index(data)
        with warnings.catch_warnings():  # torch cannot mark a tensor as read-only; nothing writes to weights
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(data, dtype=torch.uint8)
        return _linears(index, whole)
    except (struct.error, ArgumentError, *MISTAKES) as error:
        raise ValueError(f"it is damaged: {error!r}") from error


def _read_index(data: mmap.mmap) -> dict[str, Any]:
    digest, start, size, magic = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    text = data[start : start + size]
    if magic != MAGIC or len(text) != size or blake2b(text, digest_size=16).digest() != digest:
        raise ValueError("it was cut short or its index is damaged")
    return json.loads(text)


def _linears(index: dict[str, Any], whole: torch.Tensor) -> PackedLinears:
    def blob(place: list[int], expected: int) -> torch.Tensor:
        start, size = place
        if size != expected or start % _ALIGNMENT or not 0 <= start <= len(whole) - size:
            raise ValueError(f"{size} bytes at {start} are not where {expected} bytes can be")
        return whole[start : start + size]

    def part(entry: dict[str, Any]) -> PackedWeight:
        rows, columns = entry["shape"]
        kind, offsets = WeightFormat(entry["format"]), Offsets(entry["offsets"])
        data = blob(entry["data"], packed_bytes(kind, offsets, rows, columns))
        bias = None if entry["bias"] is None else blob(entry["bias"], 4 * rows).view(torch.float32)
        order = None if entry["order"] is None else blob(entry["order"], 4 * columns).view(torch.int32)
        if rows < 1 or columns < 1:
            raise ValueError(f"a weight of shape {entry['shape']}")
        if order is not None and not -1 <= int(order.min()) <= int(order.max()) < columns:
            raise ValueError("a weight takes input features that are not there")
        return PackedWeight(kind, offsets, (rows, columns), data, bias, order)

    table = index["table"]
    dtype = _PLAIN[table["dtype"]]
    rows, columns = table["shape"]
    return PackedLinears(
        format=index["name"],
        table=blob(table["data"], rows * columns * dtype.itemsize).view(dtype).view(rows, columns),
        parts={name: tuple(part(entry) for entry in entries) for name, entries in index["linears"].items()},
    )
