"""What a replica tells the world of its KV cache, and its wire form.

A chain of blocks starts at its namespace root (``hashing.namespace_root``): that hash is the parent of the first block
and is itself never stored. Events of one batch apply in order; leaves are removed before their parents.
"""

import zlib
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ..cluster.ids import BlockHash, Epoch, ReplicaId
from .hashing import HASH_BYTES, TOKEN_BYTES

MAX_BATCH_BYTES = 64 * 2**20
_VERSION = 1
_ZLIB = 0x78
"""First byte of zlib's format, and no beginning of an array in msgpack."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks, each the child of the one before; ``parent`` precedes the first.

    ``token_ids`` holds ``block_size`` little-endian int32 for each of the ``hashes``.
    """

    parent: BlockHash
    hashes: tuple[BlockHash, ...]
    token_ids: bytes
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are no longer cached in that tier, children before parents."""

    hashes: tuple[BlockHash, ...]
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached any more."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The batch that begins with it restates what is cached, which is news only to those who lost track.

    Part 0 replaces all that was known; each further part, in the batch after, adds to it.
    """

    number: int


KvEvent = BlocksStored | BlocksRemoved | CacheCleared | SnapshotPart


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events of one incarnation of a replica; ``seq`` rises by one per batch, so a gap shows."""

    replica: ReplicaId
    epoch: Epoch
    seq: int
    events: tuple[KvEvent, ...]
    sent_at: float = 0.0
    """The replica's wall clock, in seconds; 0: not told."""


def encode(batch: KvEventBatch, *, compress: bool = False) -> bytes:
    """The msgpack of ``[version, replica, epoch, seq, [event, ...], sent_at]``, or its zlib form.

    Raises ValueError above MAX_BATCH_BYTES.
    """
    events = [_event_to_wire(event) for event in batch.events]
    wire = [_VERSION, batch.replica, batch.epoch, batch.seq, events, batch.sent_at]
    data = cast(bytes, msgpack.packb(wire))  # pyright: ignore[reportUnknownMemberType]
    if len(data) > MAX_BATCH_BYTES:
        raise ValueError(f"batch of {len(data)} bytes exceeds {MAX_BATCH_BYTES}")
    return zlib.compress(data, 1) if compress else data


def decode(data: bytes) -> KvEventBatch:
    """Inverse of ``encode``. Raises ValueError that names what is wrong with ``data``."""
    if len(data) > MAX_BATCH_BYTES:
        raise ValueError(f"batch of {len(data)} bytes exceeds {MAX_BATCH_BYTES}")
    if data[:1] == bytes((_ZLIB,)):
        data = _inflate(data)
    try:
        wire = cast(Any, msgpack.unpackb(data))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"batch is not msgpack: {error or type(error).__name__}") from error
    sent_at: Any = 0.0
    if isinstance(wire, list) and len(cast("list[Any]", wire)) == 6:  # replicas of an earlier version stamp none
        sent_at = cast("list[Any]", wire).pop()
    version, replica, epoch, seq, events = _fields(wire, 5, "batch")
    if version != _VERSION:
        raise ValueError(f"batch version must be {_VERSION}, got {version!r}")
    return KvEventBatch(
        ReplicaId(_typed(replica, str, "replica")),
        Epoch(_counter(epoch, "epoch")),
        _counter(seq, "seq"),
        tuple(_event_from_wire(event, f"events[{i}]") for i, event in enumerate(_list(events, "events"))),
        _typed(sent_at, float, "sent_at"),
    )


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, MAX_BATCH_BYTES)
    except zlib.error as error:
        raise ValueError(f"batch is not zlib: {error}") from error
    if not inflater.eof:
        raise ValueError(f"batch is cut off or inflates to more than {MAX_BATCH_BYTES} bytes")
    return inflated


def _event_to_wire(event: KvEvent) -> list[Any]:
    match event:
        case BlocksStored(parent, hashes, token_ids, tier):
            return ["stored", parent, b"".join(hashes), token_ids, tier]
        case BlocksRemoved(hashes, tier):
            return ["removed", b"".join(hashes), tier]
        case CacheCleared():
            return ["cleared"]
        case SnapshotPart(number):
            return ["snapshot", number]


def _event_from_wire(wire: Any, where: str) -> KvEvent:
    kind = next(iter(_list(wire, where)), None)
    if kind == "stored":
        _, parent, hashes, token_ids, tier = _fields(wire, 5, where)
        return _stored(parent, hashes, token_ids, tier, where)
    if kind == "removed":
        _, hashes, tier = _fields(wire, 3, where)
        return BlocksRemoved(_hashes(hashes, f"{where}.hashes"), _typed(tier, str, f"{where}.tier"))
    if kind == "cleared":
        _fields(wire, 1, where)
        return CacheCleared()
    if kind == "snapshot":
        return SnapshotPart(_counter(_fields(wire, 2, where)[1], f"{where}.number"))
    raise ValueError(f"{where}: unknown event {kind!r:.40}")


def _stored(parent: Any, hashes: Any, token_ids: Any, tier: Any, where: str) -> BlocksStored:
    if len(_typed(parent, bytes, f"{where}.parent")) != HASH_BYTES:
        raise ValueError(f"{where}.parent must be {HASH_BYTES} bytes, got {len(parent)}")
    run = _hashes(hashes, f"{where}.hashes")
    num_bytes = len(_typed(token_ids, bytes, f"{where}.token_ids"))
    if not num_bytes or num_bytes % (TOKEN_BYTES * len(run)):
        raise ValueError(f"{where}.token_ids: {num_bytes} bytes are not whole blocks for {len(run)} hashes")
    return BlocksStored(BlockHash(parent), run, token_ids, _typed(tier, str, f"{where}.tier"))


def _hashes(value: Any, where: str) -> tuple[BlockHash, ...]:
    packed = _typed(value, bytes, where)
    if not packed or len(packed) % HASH_BYTES:
        raise ValueError(f"{where} must be a positive multiple of {HASH_BYTES} bytes, got {len(packed)}")
    return tuple(BlockHash(packed[i : i + HASH_BYTES]) for i in range(0, len(packed), HASH_BYTES))


def _fields(value: Any, count: int, where: str) -> list[Any]:
    fields = _list(value, where)
    if len(fields) != count:
        raise ValueError(f"{where} must have {count} fields, got {len(fields)}")
    return fields


def _list(value: Any, where: str) -> list[Any]:
    return cast("list[Any]", _typed(value, list, where))


def _counter(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{where} must be a non-negative integer, got {value!r:.40}")
    return value


def _typed(value: Any, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {kind.__name__}, got {type(value).__name__}")
    return value
