"""The event bus: how routers learn what replicas hold, which of them live, and what other routers are doing.

A replica publishes its event batches in order, a snapshot when the bus wants one, and heartbeats that keep its lease.
A router reads the streams of all replicas behind one opaque cursor. A snapshot is a row of batches, the hottest
prefixes first; publishing it compacts the stream, so that whoever starts late reads the snapshot and what followed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from typing import NamedTuple, Protocol

from ..cluster.messages import ModelCard, ReplicaInfo, StartupNote
from ..cluster.metadata_store import EMBEDDED
from ..cluster.within import within
from .hot_prefixes import HotPrefix, merge_hot

Cursor = dict[str, str]
"""Where a reader stands. Only the bus that made it can read it; ``{}`` is the oldest entry kept."""

FROM_NOW = -1
"""Where whoever begins to hear stands."""

_FIRST_LEASE_S = 60.0
_WORDS_KEPT = 1024
_STREAM = "stream "
"""Before a replica's name in a cursor."""


class BusEntry(NamedTuple):
    """One encoded ``KvEventBatch`` as read from the bus."""

    replica: str
    data: bytes


class BusReader(Protocol):
    """What a router needs of a bus; arguments and results are plain values that may cross processes.

    An implementation that cannot reach its store raises ConnectionError; callers carry on with what they know.
    """

    @property
    def store(self) -> str:
        """Where it is kept, without secrets."""
        ...

    async def read(self, cursor: Cursor, timeout_s: float) -> tuple[list[BusEntry], Cursor]:
        """Entries after ``cursor``, those of one replica in order. Waits up to ``timeout_s`` when there are none.

        Returns early, perhaps without entries, when a replica joins or leaves.
        """
        ...

    async def members(self) -> list[ReplicaInfo]:
        """Replicas whose lease holds, each with what it last announced."""
        ...

    async def request_snapshot(self, replica: str) -> None:
        """Have the replica told, on its next word, that a reader lost track of it."""
        ...

    async def share(self, word: bytes) -> None:
        """Tell all routers something that matters only now; who does not listen misses it."""
        ...

    async def hear(self, heard: int, timeout_s: float) -> tuple[list[bytes], int]:
        """Words shared after position ``heard``, one's own among them, and the new position.

        Waits up to ``timeout_s`` when there are none. Begin with ``FROM_NOW``.
        """
        ...

    async def put_hot(self, source: str, prefixes: list[HotPrefix], ttl_s: float) -> None:
        """Put a source's hottest prefixes in place of those that it told before; forgotten after ``ttl_s``."""
        ...

    async def hot(self, limit: int) -> list[HotPrefix]:
        """The hottest prefixes of all sources together, hottest first, at most ``limit`` of each cache."""
        ...


class EventBus(BusReader, Protocol):
    """A bus as replicas need it too."""

    async def publish(self, replica: str, epoch: int, batches: list[bytes]) -> bool:
        """Append encoded batches, in order. True: a snapshot is wanted. Words of an older epoch are dropped."""
        ...

    async def publish_snapshot(self, replica: str, epoch: int, *parts: bytes) -> None:
        """Put a snapshot, encoded batches in order, in place of all that was published before it."""
        ...

    async def heartbeat(self, info: ReplicaInfo, ttl_s: float) -> bool:
        """Hold the lease for ``ttl_s`` from now. True: a snapshot is wanted."""
        ...

    async def leave(self, replica: str, epoch: int) -> None:
        """Give the lease back at once; an older epoch cannot end a newer one's lease."""
        ...


class ClusterBus(EventBus, Protocol):
    """A bus as a cluster needs it: with what clients must know of the model, and how far replicas have started."""

    async def check(self) -> None:
        """Whether it can be used. Raises ConfigError for what the operator must mend, else ConnectionError."""
        ...

    async def put_card(self, card: ModelCard) -> None:
        """Store what a client needs to use a model. Kept as long as some replica's heart beats."""
        ...

    async def card(self, name: str | None) -> ModelCard | None:
        """The card of a served name, or of the only model when no name is given."""
        ...

    async def report(self, replica: str, note: StartupNote) -> None:
        """A replica tells how far its start is."""
        ...

    async def notes(self) -> dict[str, StartupNote]:
        """Latest note of each replica."""
        ...

    async def clear(self) -> None:
        """Forget everything, such as what an earlier run of the cluster left behind."""
        ...

    async def close(self) -> None:
        """End this process's connections."""
        ...


def only_card(cards: Iterable[ModelCard], name: str | None) -> ModelCard | None:
    """The card of a served name, or the only one when no name is given."""
    found = [card for card in cards if name is None or name in card.names]
    return found[0] if len(found) == 1 else None


@dataclass(slots=True)
class _Stream:
    """What the bus keeps of one replica."""

    epoch: int
    lease_ends: float
    entries: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])
    num_bytes: int = 0
    info: ReplicaInfo | None = None
    wants_snapshot: bool = True
    snapshot_bytes: int = 0

    def append(self, position: int, data: bytes, capacity_bytes: int) -> None:
        self.entries.append((position, data))
        self.num_bytes += len(data)
        while self.num_bytes > max(capacity_bytes, 2 * self.snapshot_bytes) and len(self.entries) > 1:
            self.num_bytes -= len(self.entries.popleft()[1])
            self.wants_snapshot = True

    def restart(self, snapshot_bytes: int) -> None:
        self.entries.clear()
        self.num_bytes = 0
        self.snapshot_bytes = snapshot_bytes
        self.wants_snapshot = False


class InMemoryBus:
    """``ClusterBus`` in one process. ``incarnation`` tells readers' cursors of another bus from its own.

    ``clock`` gives monotonic seconds. A stream keeps its newest ``capacity_bytes``, or twice its snapshot; a lease that
    ran out takes its stream along. One ``read`` returns about ``read_bytes`` at most.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        incarnation: str,
        capacity_bytes: int = 32 * 2**20,
        read_bytes: int = 8 * 2**20,
    ) -> None:
        self._clock = clock
        self._incarnation = incarnation
        self._capacity_bytes = capacity_bytes
        self._read_bytes = read_bytes
        self._streams: dict[str, _Stream] = {}
        self._position = 0
        self._news = asyncio.Event()
        self._words: deque[bytes] = deque(maxlen=_WORDS_KEPT)
        self._num_words = 0
        self._said = asyncio.Event()
        self._hot: dict[str, tuple[float, list[HotPrefix]]] = {}
        self._cards: dict[str, ModelCard] = {}
        self._notes: dict[str, StartupNote] = {}

    @property
    def store(self) -> str:
        """See ``BusReader``."""
        return EMBEDDED

    async def publish(self, replica: str, epoch: int, batches: list[bytes]) -> bool:
        """See ``EventBus``."""
        stream = self._stream(replica, epoch)
        if stream is None:
            return False
        for data in batches:
            self._append(stream, data)
        if batches:
            self._wake()
        return stream.wants_snapshot

    async def publish_snapshot(self, replica: str, epoch: int, *parts: bytes) -> None:
        """See ``EventBus``."""
        stream = self._stream(replica, epoch)
        if stream is None:
            return
        stream.restart(sum(map(len, parts)))
        for data in parts:
            self._append(stream, data)
        self._wake()

    async def heartbeat(self, info: ReplicaInfo, ttl_s: float) -> bool:
        """See ``EventBus``."""
        self._expire()
        stream = self._stream(info.replica, info.epoch)
        if stream is None:
            return False
        joined, stream.info = stream.info is None, info
        stream.lease_ends = self._clock() + ttl_s
        if joined:
            self._wake()
        return stream.wants_snapshot

    async def leave(self, replica: str, epoch: int) -> None:
        """See ``EventBus``."""
        stream = self._streams.get(replica)
        if stream is not None and stream.epoch <= epoch:
            del self._streams[replica]
            self._wake()

    async def read(self, cursor: Cursor, timeout_s: float) -> tuple[list[BusEntry], Cursor]:
        """See ``EventBus``."""
        if cursor.get("bus") != self._incarnation:
            cursor = {}
        position = int(cursor.get("position", 0))
        if self._position <= position:
            with suppress(asyncio.TimeoutError):
                await within(timeout_s, self._news.wait())
        return self._after(cursor, position)

    async def members(self) -> list[ReplicaInfo]:
        """See ``EventBus``."""
        self._expire()
        return [stream.info for stream in self._streams.values() if stream.info is not None]

    async def request_snapshot(self, replica: str) -> None:
        """See ``EventBus``."""
        if replica in self._streams:
            self._streams[replica].wants_snapshot = True

    async def share(self, word: bytes) -> None:
        """See ``BusReader``."""
        self._words.append(word)
        self._num_words += 1
        self._said.set()
        self._said = asyncio.Event()

    async def hear(self, heard: int, timeout_s: float) -> tuple[list[bytes], int]:
        """See ``BusReader``."""
        begin = self._num_words if heard < 0 else min(heard, self._num_words)
        if begin == self._num_words:
            with suppress(asyncio.TimeoutError):
                await within(timeout_s, self._said.wait())
        fresh = min(self._num_words - begin, len(self._words))
        return list(self._words)[len(self._words) - fresh :], self._num_words

    async def put_hot(self, source: str, prefixes: list[HotPrefix], ttl_s: float) -> None:
        """See ``BusReader``."""
        self._hot[source] = (self._clock() + ttl_s, prefixes)

    async def hot(self, limit: int) -> list[HotPrefix]:
        """See ``BusReader``."""
        now = self._clock()
        self._hot = {source: told for source, told in self._hot.items() if told[0] > now}
        return merge_hot((prefixes for _, prefixes in self._hot.values()), limit)

    async def check(self) -> None:
        """See ``ClusterBus``."""

    async def put_card(self, card: ModelCard) -> None:
        """See ``ClusterBus``."""
        self._cards[card.model] = card

    async def card(self, name: str | None) -> ModelCard | None:
        """See ``ClusterBus``."""
        return only_card(self._cards.values(), name)

    async def report(self, replica: str, note: StartupNote) -> None:
        """See ``ClusterBus``."""
        self._notes[replica] = note

    async def notes(self) -> dict[str, StartupNote]:
        """See ``ClusterBus``."""
        return self._notes

    async def clear(self) -> None:
        """See ``ClusterBus``."""
        self._streams.clear()
        self._hot.clear()
        self._cards.clear()
        self._notes.clear()
        self._wake()

    async def close(self) -> None:
        """See ``ClusterBus``."""

    def _stream(self, replica: str, epoch: int) -> _Stream | None:
        """The replica's stream, made anew for a newer epoch; None for an older one."""
        stream = self._streams.get(replica)
        if stream is None or stream.epoch < epoch:
            # Words without a heartbeat, such as a dead replica's last, must not stay for ever.
            stream = self._streams[replica] = _Stream(epoch, self._clock() + _FIRST_LEASE_S)
        return stream if stream.epoch == epoch else None

    def _append(self, stream: _Stream, data: bytes) -> None:
        self._position += 1
        stream.append(self._position, data, self._capacity_bytes)

    def _after(self, cursor: Cursor, position: int) -> tuple[list[BusEntry], Cursor]:
        """The streams take turns, so that a reader who starts gets the hottest prefixes of all replicas first."""
        fresh: list[list[tuple[int, BusEntry]]] = []
        reached: Cursor = {}
        for replica in self._in_turn(cursor.get("last", "")):
            stream = self._streams[replica]
            since = int(cursor.get(_STREAM + replica, position))
            reached[_STREAM + replica] = str(since)
            news = takewhile(lambda entry, since=since: entry[0] > since, reversed(stream.entries))
            fresh.append([(at, BusEntry(replica, data)) for at, data in news][::-1])
        entries: list[BusEntry] = []
        size = 0
        for turn in zip_longest(*fresh):
            for at, entry in filter(None, turn):
                if entries and size + len(entry.data) > self._read_bytes:
                    return entries, {"bus": self._incarnation, "position": str(position), **reached}
                entries.append(entry)
                size += len(entry.data)
                reached[_STREAM + entry.replica] = str(at)
                reached["last"] = entry.replica
        return entries, {"bus": self._incarnation, "position": str(self._position)}

    def _in_turn(self, last: str) -> list[str]:
        """All replicas, from the one whose turn comes after ``last``'s."""
        names = list(self._streams)
        begin = names.index(last) + 1 if last in self._streams else 0
        return names[begin:] + names[:begin]

    def _expire(self) -> None:
        now = self._clock()
        dead = [name for name, stream in self._streams.items() if stream.lease_ends <= now]
        for name in dead:
            del self._streams[name]
        if dead:
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
