"""The event bus in Redis: a stream per replica, leases by counters, and what routers tell each other.

All keys of a cluster share one hash tag, so that scripts and one blocking read may use any of them together, in a Redis
Cluster too. docs/redis.md lists them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from ..cluster.messages import ModelCard, ReplicaInfo, StartupNote
from ..cluster.metadata_store import RedisAddress
from .announcements import (
    pack_card,
    pack_hot,
    pack_info,
    pack_note,
    unpack_card,
    unpack_hot,
    unpack_info,
    unpack_note,
    unpack_rows,
)
from .bus import BusEntry, Cursor, only_card
from .hot_prefixes import HotPrefix, merge_hot
from .leases import Beat, LeaseWatch
from .quota import Spend, Spent
from .redis_client import Client, connect, reporting
from .redis_listener import Listener
from .redis_scripts import HEARTBEAT, LEAVE, PUBLISH, RECORDS, SNAPSHOT, SPEND, WANT

KEEP_S = 60.0
"""How long Redis keeps what nobody renews: a dead replica's stream, a model's card."""
NOTES_KEEP_S = 3600.0
_MOST_BLOCK_S = 1.0
"""One command that waits must end well before it counts as hung."""
_EPOCH_DIGITS = 20
_MAX_COUNT = 1024
_NEWS = ""
"""The entry of a cursor that tells how far the news have been read; the others are named after replicas."""

logger = logging.getLogger(__name__)


class RedisEventBus:
    """``ClusterBus`` over Redis 7 or newer. Connects when first used; raises ConnectionError while Redis is away.

    ``clock`` gives monotonic seconds. A replica is asked for a snapshot whenever its events since the last one take
    ``capacity_bytes``, or as much as that one. One ``read`` returns about ``read_bytes``; it begins with one entry of
    each stream, so that a new router soon knows the hottest prefixes of all replicas.
    """

    def __init__(
        self,
        address: RedisAddress,
        clock: Callable[[], float] = time.monotonic,
        capacity_bytes: int = 16 * 2**20,
        read_bytes: int = 4 * 2**20,
    ) -> None:
        self.address = address
        self._capacity_bytes = capacity_bytes
        self._read_bytes = read_bytes
        self._tag = f"{{{address.prefix}}}"
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._listener = Listener(address, f"{self._tag}:words")
        self._watch = LeaseWatch(clock)
        self._names: list[str] | None = None
        self._count = 1
        self._written: dict[str, tuple[int, int]] = {}
        self._snapshot_bytes: dict[str, int] = {}
        self._cards: dict[str, ModelCard] = {}
        self._announced: dict[str, tuple[bytes, ReplicaInfo]] = {}

    @property
    def store(self) -> str:
        """See ``BusReader``."""
        return str(self.address)

    async def check(self) -> None:
        """See ``ClusterBus``. Connects and writes something."""
        async with reporting(self.address, at_start=True):
            client = await self._connected()
            await client.set(f"{self._tag}:check", b"1", px=1000)

    async def publish(self, replica: str, epoch: int, batches: list[bytes]) -> bool:
        """See ``EventBus``."""
        capacity = max(self._capacity_bytes, self._snapshot_bytes.get(replica, 0))
        return await self._append(PUBLISH, replica, epoch, capacity, *batches) > 0

    async def publish_snapshot(self, replica: str, epoch: int, *parts: bytes) -> None:
        """See ``EventBus``."""
        self._snapshot_bytes[replica] = sum(map(len, parts))
        if await self._append(SNAPSHOT, replica, epoch, None, parts[0]) < 0:
            return
        for part in parts[1:]:
            await self._append(PUBLISH, replica, epoch, 0, part)

    async def heartbeat(self, info: ReplicaInfo, ttl_s: float) -> bool:
        """See ``EventBus``."""
        wants = await self._run(
            HEARTBEAT,
            [*self._keys(info.replica), f"{self._tag}:cards"],
            [*_stamp(info.replica, info.epoch), pack_info(info), int(ttl_s * 1000)],
        )
        if wants >= 2:
            with suppress(ConnectionError):  # the heart has beaten; the next beat tries again
                for card in self._cards.values():
                    await self.put_card(card)
        return wants in (1, 3)

    async def leave(self, replica: str, epoch: int) -> None:
        """See ``EventBus``."""
        await self._run(LEAVE, self._keys(replica), _stamp(replica, epoch))

    async def read(self, cursor: Cursor, timeout_s: float) -> tuple[list[BusEntry], Cursor]:
        """See ``BusReader``."""
        async with self._reporting():
            client = await self._connected()
            if self._names is None or not cursor:
                self._names = await self._all_names(client)
            left_s, had_news = timeout_s, False
            while True:
                wait_s = 0.0 if had_news else min(left_s, _MOST_BLOCK_S)
                entries, after = await self._read_once(client, cursor, wait_s)
                left_s -= wait_s
                fresh_news = after.get(_NEWS) != cursor.get(_NEWS)
                if fresh_news:
                    self._names = await self._all_names(client)
                if entries or had_news or (left_s <= 0 and not fresh_news):
                    return entries, after
                cursor, had_news = after, fresh_news

    async def _read_once(self, client: Client, cursor: Cursor, wait_s: float) -> tuple[list[BusEntry], Cursor]:
        streams = {self._stream(name): cursor.get(name, "0") for name in (_NEWS, *(self._names or ()))}
        block = {"block": max(1, int(wait_s * 1000))} if wait_s > 0 else {}
        found = cast("list[Any]", await client.xread(streams, count=self._count, **block)) or []
        return self._taken(cursor, found)

    async def members(self) -> list[ReplicaInfo]:
        """See ``BusReader``."""
        try:
            async with self._reporting():
                client = await self._connected()
                names = await self._all_names(client)
                rows = await self._records(client, names)
                await self._forget(client, [name for name, row in rows.items() if not any(row)])
        except ConnectionError:
            self._watch.lost_touch()
            raise
        self._names = names
        beats = {name: beat for name, row in rows.items() if (beat := self._beat(name, row))}
        return self._watch.judge(beats, {name for name, row in rows.items() if row[3]})

    async def request_snapshot(self, replica: str) -> None:
        """See ``BusReader``."""
        await self._run(WANT, [self._record(replica)], [])

    async def share(self, word: bytes) -> None:
        """See ``BusReader``."""
        async with self._reporting():
            await (await self._connected()).publish(self._listener.channel, word)

    async def hear(self, heard: int, timeout_s: float) -> tuple[list[bytes], int]:
        """See ``BusReader``. Only words from the first call on are heard, whatever ``heard`` says."""
        async with self._reporting():
            words = await self._listener.hear(await self._connected(), timeout_s)
        return words, max(0, heard) + len(words)

    async def put_hot(self, source: str, prefixes: list[HotPrefix], ttl_s: float) -> None:
        """See ``BusReader``."""
        async with self._reporting():
            client = await self._connected()
            await client.set(f"{self._tag}:hot:{source}", pack_hot(prefixes), px=max(1, int(ttl_s * 1000)))
            await client.sadd(f"{self._tag}:hot", source)

    async def hot(self, limit: int) -> list[HotPrefix]:
        """See ``BusReader``."""
        async with self._reporting():
            client = await self._connected()
            sources = await self._hot_sources(client)
            rows = [await client.get(f"{self._tag}:hot:{source}") for source in sources]
            gone = [source for source, row in zip(sources, rows, strict=True) if row is None]
            if gone:
                await client.srem(f"{self._tag}:hot", *gone)
        return merge_hot((prefixes for row in rows if row and (prefixes := _readable(unpack_hot, row))), limit)

    async def put_card(self, card: ModelCard) -> None:
        """See ``ClusterBus``."""
        self._cards[card.model] = card
        async with self._reporting():
            client = await self._connected()
            await client.hset(f"{self._tag}:cards", card.model, pack_card(card))
            await client.pexpire(f"{self._tag}:cards", int(KEEP_S * 1000))

    async def card(self, name: str | None) -> ModelCard | None:
        """See ``ClusterBus``."""
        async with self._reporting():
            rows = cast("dict[bytes, bytes]", await (await self._connected()).hgetall(f"{self._tag}:cards"))
        return only_card((card for row in rows.values() if (card := _readable(unpack_card, row))), name)

    async def report(self, replica: str, note: StartupNote) -> None:
        """See ``ClusterBus``."""
        async with self._reporting():
            client = await self._connected()
            await client.hset(f"{self._tag}:notes", replica, pack_note(note))
            await client.pexpire(f"{self._tag}:notes", int(NOTES_KEEP_S * 1000))

    async def notes(self) -> dict[str, StartupNote]:
        """See ``ClusterBus``."""
        async with self._reporting():
            rows = cast("dict[bytes, bytes]", await (await self._connected()).hgetall(f"{self._tag}:notes"))
        return {_text(name): note for name, row in rows.items() if (note := _readable(unpack_note, row))}

    async def spend(self, spends: Sequence[Spend], *, force: bool = False) -> Spent:
        """See ``QuotaStore``."""
        arguments: list[Any] = [int(force)]
        for spend in spends:
            arguments += [spend.cost, spend.per_minute]
        async with self._reporting():
            script = (await self._connected()).register_script(SPEND)
            done, *rows = await script(keys=[f"{self._tag}:quota:{spend.bucket}" for spend in spends], args=arguments)
        levels = [float(row) for row in rows]
        waits = [0.0 if done else spend.wait_s(level) for spend, level in zip(spends, levels, strict=True)]
        return Spent(bool(done), levels, waits)

    async def clear(self) -> None:
        """See ``ClusterBus``."""
        async with self._reporting():
            client = await self._connected()
            keys = [f"{self._tag}:{name}" for name in ("names", "cards", "notes", "hot")]
            for name in await self._all_names(client):
                keys += [self._record(name), self._stream(name)]
            keys += [f"{self._tag}:hot:{source}" for source in await self._hot_sources(client)]
            await client.delete(*keys)
        self._names = None

    async def close(self) -> None:
        """See ``ClusterBus``."""
        await self._listener.close()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _reporting(self) -> Any:
        return reporting(self.address)

    async def _connected(self) -> Client:
        if self._client is None:
            async with self._connecting:
                if self._client is None:
                    self._client = await connect(self.address)
        return self._client

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> int:
        async with self._reporting():
            client = await self._connected()
            return int(await client.register_script(script)(keys=keys, args=arguments))

    async def _append(self, script: str, replica: str, epoch: int, capacity: int | None, *data: bytes) -> int:
        """Run a script that appends entries under numbers that rise within the epoch, whatever Redis remembers."""
        known_epoch, number = self._written.get(replica, (epoch, 0))
        number = number + 1 if known_epoch == epoch else 1
        self._written[replica] = (epoch, number + len(data) - 1)
        limit = [] if capacity is None else [capacity]
        return await self._run(script, self._keys(replica), [*_stamp(replica, epoch), epoch, number, *limit, *data])

    async def _all_names(self, client: Client) -> list[str]:
        return sorted(_text(name) for name in await client.smembers(f"{self._tag}:names"))

    async def _hot_sources(self, client: Client) -> list[str]:
        return sorted(_text(name) for name in await client.smembers(f"{self._tag}:hot"))

    async def _records(self, client: Client, names: list[str]) -> dict[str, list[Any]]:
        """What each replica's record says: announcement, heartbeats, lease, whether it left, epoch."""
        if not names:
            return {}
        packed = await client.register_script(RECORDS)(keys=[self._record(name) for name in names])
        return dict(zip(names, unpack_rows(packed), strict=True))

    def _beat(self, name: str, row: list[Any]) -> Beat | None:
        info, beat, ttl, *_ = row
        if not (info and beat and ttl):
            return None
        known = self._announced.get(name)
        try:
            if known is None or known[0] != info:
                known = self._announced[name] = (info, unpack_info(info))
            return Beat(known[1], int(beat), int(ttl) / 1000)
        except ValueError as error:
            logger.warning("skipping the announcement of %s: %s", name, error)
            return None

    async def _forget(self, client: Client, gone: list[str]) -> None:
        """Whoever lives after all is entered again by its next heartbeat."""
        for name in gone:
            self._announced.pop(name, None)
        if gone:
            await client.srem(f"{self._tag}:names", *gone)

    def _taken(self, cursor: Cursor, found: list[Any]) -> tuple[list[BusEntry], Cursor]:
        """Entries of a reply, breadth first, and where the reader stands now. Adapts the size of the next reply."""
        after, entries, size = dict(cursor), list[tuple[int, BusEntry]](), 0
        for key, rows in found:
            name = _text(key).removeprefix(self._stream(_NEWS))
            after[name] = _text(rows[-1][0])
            if name == _NEWS:
                continue
            for order, (_, fields) in enumerate(rows):
                data = cast("Mapping[bytes, bytes]", fields or {}).get(b"batch", b"")
                entries.append((order, BusEntry(name, data)))
                size += len(data)
        if size > self._read_bytes:
            self._count = max(1, self._count // 2)
        elif 2 * size < self._read_bytes:
            self._count = min(_MAX_COUNT, 2 * self._count)
        entries.sort(key=lambda pair: pair[0])
        return [entry for _, entry in entries], after

    def _keys(self, replica: str) -> list[str]:
        return [self._record(replica), self._stream(replica), f"{self._tag}:names", self._stream(_NEWS)]

    def _record(self, replica: str) -> str:
        return f"{self._tag}:replica:{replica}"

    def _stream(self, replica: str) -> str:
        return f"{self._tag}:stream:{replica}"


def _stamp(replica: str, epoch: int) -> list[Any]:
    """What every script of a writer begins with."""
    return [f"{epoch:0{_EPOCH_DIGITS}d}", replica, int(KEEP_S * 1000)]


def _readable(unpack: Callable[[bytes], Any], row: bytes) -> Any:
    """What a row says, or None where it says nothing."""
    try:
        return unpack(row)
    except ValueError as error:
        logger.warning("skipping what Redis holds: %s", error)
        return None


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
