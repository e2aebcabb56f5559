"""Wire forms of what replicas announce and routers tell of hot prefixes: plain values for msgpack.

Whatever does not decode raises ValueError, which names the fault.
"""

import dataclasses
import math
import zlib
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ..cluster.ids import BlockHash, ReplicaId
from ..cluster.messages import ModelCard, RankInfo, ReplicaInfo, StartupNote
from .hashing import HASH_BYTES, TOKEN_BYTES
from .hot_prefixes import HotPrefix

_MAX_CARD_BYTES = 256 * 2**20
_Value = TypeVar("_Value", ReplicaInfo, RankInfo, ModelCard, StartupNote)
_AT_LEAST_ONE = frozenset(
    ("block_size", "kv_total_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size")
)


def _types_of(annotation: Any) -> tuple[type, ...]:
    """What ``isinstance`` takes for an annotation; an int is a float."""
    if isinstance(annotation, UnionType):
        return tuple(kind for member in get_args(annotation) for kind in _types_of(member))
    plain = getattr(annotation, "__supertype__", annotation)
    return (int, float) if plain is float else (get_origin(plain) or plain,)


_TYPES = {
    kind: {spec.name: _types_of(spec.type) for spec in dataclasses.fields(kind)}
    for kind in (ReplicaInfo, RankInfo, ModelCard, StartupNote)
}


def info_to_wire(info: ReplicaInfo) -> dict[str, Any]:
    """Fields by name."""
    return dataclasses.asdict(info)


def info_from_wire(wire: dict[str, Any]) -> ReplicaInfo:
    """Inverse of ``info_to_wire``."""
    fields = _known(ReplicaInfo, wire)
    ranks = cast("list[dict[str, Any]]", fields.get("ranks", ()))
    fields["ranks"] = tuple(_checked(RankInfo(**_known(RankInfo, rank))) for rank in ranks)
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
        return _checked(ModelCard(**_known(ModelCard, {**fields, "names": tuple(map(str, fields["names"]))})))
    except (zlib.error, TypeError, KeyError) as error:
        raise ValueError(f"not a model's card: {error}") from error


def pack_note(note: StartupNote) -> bytes:
    """As msgpack."""
    return _pack(dataclasses.asdict(note))


def unpack_note(data: bytes) -> StartupNote:
    """Inverse of ``pack_note``."""
    try:
        return _checked(StartupNote(**_known(StartupNote, _unpack(data))))
    except TypeError as error:
        raise ValueError(f"not a note of a start: {error}") from error


def pack_hot(prefixes: list[HotPrefix]) -> bytes:
    """As compressed msgpack."""
    rows = [[one.namespace, one.block_size, one.tokens, one.heat, one.load, one.salt] for one in prefixes]
    return zlib.compress(_pack(rows), 1)


def unpack_hot(data: bytes) -> list[HotPrefix]:
    """Inverse of ``pack_hot``."""
    try:
        return [_hot(*row) for row in _unpack(zlib.decompressobj().decompress(data, _MAX_CARD_BYTES))]
    except (zlib.error, TypeError) as error:
        raise ValueError(f"not a list of hot prefixes: {error}") from error


def unpack_rows(data: bytes) -> list[list[Any]]:
    """Rows of bytes as Redis packs them."""
    return cast("list[list[Any]]", msgpack.unpackb(data, raw=True))  # pyright: ignore[reportUnknownMemberType]


def _hot(root: Any, size: Any, tokens: Any, heat: Any, load: Any, salt: Any) -> HotPrefix:
    if not isinstance(root, bytes) or len(root) != HASH_BYTES or not isinstance(tokens, bytes):
        raise ValueError(f"a hot prefix needs a namespace of {HASH_BYTES} bytes and packed tokens")
    if type(size) is not int or not 0 < size < 2**31 or len(tokens) % (size * TOKEN_BYTES):
        raise ValueError(f"a hot prefix of {len(tokens)} bytes has no whole blocks of {size!r:.40} tokens")
    if not (0 <= heat < math.inf and 0 <= load < math.inf):
        raise ValueError(f"a hot prefix must not have heat {heat!r:.40} and load {load!r:.40}")
    return HotPrefix(BlockHash(root), size, tokens, float(heat), float(load), str(salt))


def _known(kind: type[_Value], wire: Any) -> dict[str, Any]:
    """Without the fields of a later release: during an update both are about. Raises TypeError for no map."""
    if not isinstance(wire, dict):
        raise TypeError(f"a map was expected, not {type(wire).__name__}")
    wire = cast("dict[str, Any]", wire)
    return {name: value for name, value in wire.items() if name in _TYPES[kind]}


def _checked(value: _Value) -> _Value:
    for name, types in _TYPES[type(value)].items():
        found: Any = getattr(value, name)
        if not isinstance(found, types):
            raise ValueError(f"{type(value).__name__}.{name} must not be {type(found).__name__}")
        least = 1 if name in _AT_LEAST_ONE else 0
        if isinstance(found, (int, float)) and name != "seed" and not least <= found < math.inf:
            raise ValueError(f"{type(value).__name__}.{name} must not be {found!r:.40}")
    return value


def _pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))  # pyright: ignore[reportUnknownMemberType]


def _unpack(data: bytes) -> Any:
    try:
        return cast(Any, msgpack.unpackb(data, strict_map_key=False))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"not msgpack: {error or type(error).__name__}") from error
