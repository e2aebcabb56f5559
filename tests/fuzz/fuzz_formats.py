"""Writes model files out of plain trees, so that a mutation may say anything at all."""

import json
import struct
from hashlib import blake2b
from typing import Any

from warmroot.actors.models.packed_file import MAGIC

_STRING, _ARRAY = 8, 9


def as_json(tree: Any) -> bytes:
    return json.dumps(tree, default=lambda value: value.decode("latin-1")).encode()


def as_gguf(tree: dict[str, Any]) -> bytes:
    """Of ``{version, metadata, tensors: [[name, dims, type, offset]], data: number of bytes}``."""
    metadata, tensors = dict(tree["metadata"]), list(tree["tensors"])
    head = b"GGUF" + struct.pack("<IQQ", int(tree["version"]), len(tensors), len(metadata))
    keys = b"".join(
        _text(str(key)) + struct.pack("<I", _kind(value)) + _value(value) for key, value in metadata.items()
    )
    places = b"".join(
        _text(str(name)) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, storage, offset)
        for name, dims, storage, offset in tensors
    )
    body = head + keys + places
    return body + bytes(-len(body) % 32) + _filler(min(int(tree["data"]), 2**20))


def as_safetensors(tree: dict[str, Any]) -> bytes:
    """Of ``{header, data: number of bytes}``."""
    header = as_json(tree["header"])
    return struct.pack("<Q", len(header)) + header + _filler(min(int(tree["data"]), 2**20))


def as_packed(tree: dict[str, Any]) -> bytes:
    """Of ``{index, data: number of bytes}``, with the digest that belongs to the index."""
    text, data = as_json(tree["index"]), bytes(min(int(tree["data"]), 2**20))
    return data + text + struct.pack("<16sQQ8s", blake2b(text, digest_size=16).digest(), len(data), len(text), MAGIC)


def _filler(size: int) -> bytes:
    return (b"\x01\x02\x03\x04" * (size // 4 + 1))[:size]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _kind(value: Any) -> int:
    match value:
        case bool():
            return 7
        case int():
            return 10 if value >= 2**32 else 11 if value < 0 else 4
        case float():
            return 12
        case list() | tuple():
            return _ARRAY
        case _:
            return _STRING


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<?", value)
        case int():
            return struct.pack({4: "<I", 10: "<Q", 11: "<q"}[_kind(value)], value)
        case float():
            return struct.pack("<d", value)
        case list() | tuple():
            kinds = {_kind(item) for item in value}
            kind = kinds.pop() if len(kinds) == 1 else _STRING
            items = b"".join(_value(item) if kind == _kind(item) else _text(str(item)) for item in value)
            return struct.pack("<IQ", kind, len(value)) + items
        case bytes():
            return struct.pack("<Q", len(value)) + value
        case _:
            return _text(str(value))
