"""Snapshots in parts: how they are cut, sent, and what an index makes of them."""

import asyncio
import time
import zlib

import pytest

from warmroot.actors import event_publisher
from warmroot.actors.event_publisher import EventPublisher
from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.kv_store import events
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, KvEventBatch, SnapshotPart, decode, encode
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.kv_store.index import Applied, PrefixIndex
from warmroot.kv_store.snapshot_parts import FIRST_PART_BLOCKS, MOST_PART_BLOCKS, snapshot_parts

from bus_contract import read_all, replica_info  # isort: skip

ROOT = namespace_root("m")
A = ReplicaId("a")


def run(tokens, parent=ROOT):
    hashes = chain(parent, tokens, 16)
    return BlocksStored(parent, tuple(hashes), pack_tokens(tokens[: len(hashes) * 16]))


def batch(seq, *events, epoch=1):
    return KvEventBatch(A, Epoch(epoch), seq, events)


def held(index, tokens):
    return index.match(ROOT, pack_tokens(tokens), 16).get(A, 0)


def test_parts_hold_all_blocks_in_order_and_grow():
    runs = [run([topic] * 16 * 700) for topic in range(20)]
    parts = list(snapshot_parts(runs))
    sizes = [sum(len(event.hashes) for event in part) for part in parts]
    assert sizes[:4] == [FIRST_PART_BLOCKS, 2 * FIRST_PART_BLOCKS, 4 * FIRST_PART_BLOCKS, MOST_PART_BLOCKS]
    assert sum(sizes) == 20 * 700
    assert max(sizes) == MOST_PART_BLOCKS
    assert [key for part in parts for event in part for key in event.hashes] == [k for r in runs for k in r.hashes]
    index = PrefixIndex()
    for seq, part in enumerate(parts):
        assert index.apply(batch(seq, SnapshotPart(seq), *part)) is Applied.APPLIED
        assert index.blocks_of(A) == sum(sizes[: seq + 1])


def test_nothing_cached_is_one_empty_part():
    assert list(snapshot_parts([])) == [[]]


def test_compressed_batches_are_read_like_others_and_bounded(monkeypatch):
    source = batch(7, SnapshotPart(0), run([5] * 1600))
    packed = encode(source, compress=True)
    assert decode(packed) == source
    assert len(packed) < len(encode(source)) / 2
    with pytest.raises(ValueError, match="cut off"):
        decode(packed[:-9])
    with pytest.raises(ValueError, match="not zlib"):
        decode(b"\x78\x9cgarbage")
    monkeypatch.setattr(events, "MAX_BATCH_BYTES", 2000)
    with pytest.raises(ValueError, match="more than 2000"):
        decode(zlib.compress(b"\x00" * 1_000_000))


def test_who_is_in_step_passes_over_a_snapshot():
    index = PrefixIndex()
    index.apply(batch(0, SnapshotPart(0), run([1] * 32)))
    index.apply(batch(1, run([2] * 32)))
    assert index.apply(batch(2, SnapshotPart(0), run([9] * 32))) is Applied.APPLIED
    assert index.apply(batch(3, SnapshotPart(1), run([8] * 32))) is Applied.APPLIED
    assert (held(index, [1] * 32), held(index, [9] * 32), held(index, [8] * 32)) == (32, 0, 0)
    assert index.apply(batch(4, BlocksRemoved(tuple(chain(ROOT, [1] * 32, 16)[::-1])))) is Applied.APPLIED
    assert (held(index, [1] * 32), held(index, [2] * 32)) == (0, 32)


def test_who_is_not_takes_all_of_it():
    index = PrefixIndex()
    index.apply(batch(0, SnapshotPart(0), run([1] * 32)))
    assert index.apply(batch(5, run([2] * 32))) is Applied.GAP
    assert index.apply(batch(6, SnapshotPart(0), run([3] * 32))) is Applied.APPLIED
    assert index.apply(batch(7, SnapshotPart(1), run([4] * 32))) is Applied.APPLIED
    assert [held(index, [n] * 32) for n in (1, 2, 3, 4)] == [0, 0, 32, 32]


def test_a_part_alone_is_a_gap_and_a_snapshot_begun_anew_replaces():
    index = PrefixIndex()
    assert index.apply(batch(3, SnapshotPart(1), run([1] * 32))) is Applied.GAP
    index.apply(batch(4, SnapshotPart(0), run([2] * 32)))
    index.apply(batch(5, SnapshotPart(0), run([3] * 32)))
    assert [held(index, [n] * 32) for n in (1, 2, 3)] == [0, 0, 32]


def test_dropping_spares_a_newer_epoch():
    index = PrefixIndex()
    index.apply(batch(0, SnapshotPart(0), run([1] * 32), epoch=2))
    index.drop(A, before=Epoch(2))
    assert held(index, [1] * 32) == 32
    index.drop(A, before=Epoch(3))
    assert held(index, [1] * 32) == 0


class Flaky(InMemoryBus):
    """Can be away."""

    def __init__(self):
        super().__init__(time.monotonic, "bus")
        self.away = self.full = False
        self.calls = 0

    async def publish(self, *arguments):
        self._answer(self.full)
        return await super().publish(*arguments)

    async def publish_snapshot(self, *arguments):
        self.calls += 1
        self._answer(self.full)
        await super().publish_snapshot(*arguments)

    async def heartbeat(self, *arguments):
        self._answer()
        return await super().heartbeat(*arguments)

    def _answer(self, full=False):
        if self.away or full:
            raise ConnectionError("away")


class Cache:
    def __init__(self):
        self.stored = []

    async def snapshot(self):
        return list(self.stored)

    def store(self, publisher, tokens):
        self.stored.append(run(tokens))
        publisher.add([self.stored[-1]])


@pytest.fixture
async def publishing(monkeypatch):
    monkeypatch.setattr(event_publisher, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(event_publisher, "GATHER_S", 0.001)
    bus, cache = Flaky(), Cache()
    publisher = EventPublisher(bus, replica_info(), cache.snapshot)
    yield bus, cache, publisher
    await publisher.close()


async def followed(bus, cache, index=None):
    """An index that has read everything and knows what is cached."""
    index, cursor = index or PrefixIndex(), {}
    for _ in range(300):
        entries, cursor = await read_all(bus, cursor)
        for _, data in entries:
            index.apply(decode(data))
        if index.blocks_of(A) == sum(len(event.hashes) for event in cache.stored):
            return index
        await asyncio.sleep(0.01)
    raise AssertionError(f"the index has {index.blocks_of(A)} blocks")


async def test_what_happens_while_the_bus_is_away_is_made_up_for(publishing):
    bus, cache, publisher = publishing
    await publisher.start()
    cache.store(publisher, [1] * 32)
    index = await followed(bus, cache)
    bus.away = True
    cache.store(publisher, [2] * 32)
    await asyncio.sleep(0.1)
    cache.store(publisher, [3] * 32)
    assert publisher._pending == []
    calls = bus.calls
    await asyncio.sleep(0.1)
    assert bus.calls == calls  # no snapshot is made for a bus that is away
    bus.away = False
    await followed(bus, cache, index)
    assert [held(index, [n] * 32) for n in (1, 2, 3)] == [32, 32, 32]


async def test_a_bus_without_room_is_tried_less_and_less(publishing, monkeypatch):
    bus, cache, publisher = publishing
    await publisher.start()
    await followed(bus, cache)
    bus.full, before = True, bus.calls
    for topic in range(40):
        cache.store(publisher, [topic] * 32)
        await asyncio.sleep(0.01)
    assert bus.calls - before < 8
    bus.full = False
    monkeypatch.setattr(publisher, "_failures", 0)
    await followed(bus, cache)


async def test_a_replica_starts_without_its_bus(publishing):
    bus, cache, publisher = publishing
    bus.away = True
    await publisher.start()
    cache.store(publisher, [1] * 32)
    bus.away = False
    await followed(bus, cache)


async def test_events_before_a_snapshot_keep_readers_in_step(publishing):
    bus, cache, publisher = publishing
    await publisher.start()
    index = await followed(bus, cache)
    cache.store(publisher, [1] * 32)
    await bus.request_snapshot("a")
    cache.store(publisher, [2] * 32)
    await followed(bus, cache, index)
