"""Wire forms of what replicas announce and routers tell of hot prefixes: plain values for msgpack.

Whatever does not decode raises ValueError, which names the fault.
"""

import dataclasses
import zlib
from typing import Any, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ..cluster.ids import BlockHash, ReplicaId
from ..cluster.messages import ModelCard, RankInfo, ReplicaInfo, StartupNote
from .hot_prefixes import HotPrefix

_MAX_CARD_BYTES = 256 * 2**20
_Value = TypeVar("_Value", ReplicaInfo, RankInfo, ModelCard, StartupNote)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "epoch": int,
    "kv_namespace": bytes,
    "block_size": int,
    "kv_total_blocks": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "max_model_len": int,
    "prefill_tokens_per_s": (int, float),
    "decode_step_s": (int, float),
    "pid": int,
    "num_threads": int,
    "ranks": tuple,
    "rank": int,
    "stage": int,
    "memory_bytes": int,
    "last_step": int,
}
"""Fields of ReplicaInfo and RankInfo that are no text."""


def info_to_wire(info: ReplicaInfo) -> dict[str, Any]:
    """Fields by name."""
    return dataclasses.asdict(info)


def info_from_wire(wire: dict[str, Any]) -> ReplicaInfo:
    """Inverse of ``info_to_wire``."""
    fields = dict(wire)
    ranks = cast("list[dict[str, Any]]", fields.get("ranks", ()))
    fields["ranks"] = tuple(_checked(RankInfo(**rank)) for rank in ranks)
    info = _checked(ReplicaInfo(**fields))
    return dataclasses.replace(info, replica=ReplicaId(info.replica))


def pack_info(info: ReplicaInfo) -> bytes:
    """As msgpack."""
    return _pack(info_to_wire(info))


def unpack_info(data: bytes) -> ReplicaInfo:
    """Inverse of ``pack_info``."""
    try:
        return info_from_wire(_unpack(data))
    except TypeError as error:
        raise ValueError(f"not a replica's announcement: {error}") from error


def pack_card(card: ModelCard) -> bytes:
    """As compressed msgpack: a tokenizer has megabytes."""
    return zlib.compress(_pack(dataclasses.asdict(card)), 1)


def unpack_card(data: bytes) -> ModelCard:
    """Inverse of ``pack_card``."""
    inflater = zlib.decompressobj()
    try:
        fields = _unpack(inflater.decompress(data, _MAX_CARD_BYTES))
        return ModelCard(**fields | {"names": tuple(fields["names"])})
    except (zlib.error, TypeError, KeyError) as error:
        raise ValueError(f"not a model's card: {error}") from error


def pack_note(note: StartupNote) -> bytes:
    """As msgpack."""
    return _pack(dataclasses.asdict(note))


def unpack_note(data: bytes) -> StartupNote:
    """Inverse of ``pack_note``."""
    try:
        return StartupNote(**_unpack(data))
    except TypeError as error:
        raise ValueError(f"not a note of a start: {error}") from error


def pack_hot(prefixes: list[HotPrefix]) -> bytes:
    """As compressed msgpack."""
    rows = [[one.namespace, one.block_size, one.tokens, one.heat, one.load, one.salt] for one in prefixes]
    return zlib.compress(_pack(rows), 1)


def unpack_hot(data: bytes) -> list[HotPrefix]:
    """Inverse of ``pack_hot``."""
    try:
        rows = _unpack(zlib.decompressobj().decompress(data, _MAX_CARD_BYTES))
        return [
            HotPrefix(BlockHash(bytes(root)), int(size), bytes(tokens), float(heat), float(load), str(salt))
            for root, size, tokens, heat, load, salt in rows
        ]
    except (zlib.error, TypeError) as error:
        raise ValueError(f"not a list of hot prefixes: {error}") from error


def unpack_rows(data: bytes) -> list[list[Any]]:
    """Rows of bytes as Redis packs them."""
    return cast("list[list[Any]]", msgpack.unpackb(data, raw=True))  # pyright: ignore[reportUnknownMemberType]


def _checked(value: _Value) -> _Value:
    for spec in dataclasses.fields(value):
        found: Any = getattr(value, spec.name)
        if not isinstance(found, _TYPES.get(spec.name, str)):
            raise ValueError(f"{type(value).__name__}.{spec.name} must not be {type(found).__name__}")
    return value


def _pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))  # pyright: ignore[reportUnknownMemberType]


def _unpack(data: bytes) -> Any:
    try:
        return cast(Any, msgpack.unpackb(data, strict_map_key=False))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"not msgpack: {error or type(error).__name__}") from error
