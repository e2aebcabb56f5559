import pickle

import pytest
from bus_contract import BusContract, read_all, replica_info
from manual_clock import ManualClock

from warmroot.kv_store.bus import InMemoryBus


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def bus(clock):
    return InMemoryBus(clock, "bus-1")


@pytest.fixture
def advance(clock):
    async def seconds(amount):
        clock.now += amount

    return seconds


class TestInMemoryBus(BusContract):
    pass


async def test_a_full_stream_drops_its_oldest_and_wants_a_snapshot(clock):
    bus = InMemoryBus(clock, "bus-1", capacity_bytes=30)
    await bus.publish_snapshot("a", 1, b"s" * 10)
    assert not await bus.publish("a", 1, [b"0" * 10, b"1" * 10])
    assert await bus.publish("a", 1, [b"2" * 10])
    assert [data[:1] for _, data in (await read_all(bus, {}))[0]] == [b"0", b"1", b"2"]


async def test_an_entry_above_the_capacity_is_still_delivered(clock):
    bus = InMemoryBus(clock, "bus-1", capacity_bytes=5)
    await bus.publish("a", 1, [b"0" * 10])
    assert (await read_all(bus, {}))[0] == [("a", b"0" * 10)]


async def test_one_read_is_bounded_and_the_next_goes_on(clock):
    bus = InMemoryBus(clock, "bus-1", read_bytes=25)
    await bus.publish("a", 1, [bytes([n]) * 10 for n in range(5)])
    entries, cursor = await bus.read({}, 0.0)
    assert [entry.data[0] for entry in entries] == [0, 1]
    assert [data[0] for _, data in (await read_all(bus, cursor))[0]] == [2, 3, 4]


async def test_a_cursor_of_another_bus_starts_at_the_oldest(clock):
    before = InMemoryBus(clock, "bus-1")
    await before.publish("a", 1, [b"0", b"1", b"2"])
    _, cursor = await read_all(before, {})
    after = InMemoryBus(clock, "bus-2")
    await after.publish("a", 1, [b"3"])
    assert (await read_all(after, cursor))[0] == [("a", b"3")]


async def test_words_without_a_lease_do_not_stay_for_ever(bus, advance):
    await bus.publish("ghost", 1, [b"0"])
    await advance(120.0)
    await bus.members()
    assert (await read_all(bus, {}))[0] == []


async def test_values_cross_processes(bus):
    await bus.heartbeat(replica_info(), 5.0)
    await bus.publish("a", 1, [b"0"])
    values = (await bus.members(), await bus.read({}, 0.0))
    assert pickle.loads(pickle.dumps(values)) == values


async def test_who_starts_reads_the_streams_in_turns(clock):
    bus = InMemoryBus(clock, "bus-1", read_bytes=20)
    for name in "abc":
        await bus.publish(name, 1, [name.encode() + bytes([48 + n]) * 9 for n in range(3)])
    cursor, seen = {}, []
    for _ in range(3):
        entries, cursor = await bus.read(cursor, 0.0)
        seen.append([entry.data[:2] for entry in entries])
    assert seen == [[b"a0", b"b0"], [b"c0", b"a1"], [b"b1", b"c1"]]
    await bus.publish("b", 1, [b"b3"])
    await bus.leave("c", 1)
    await bus.publish("d", 1, [b"d0"])
    rest, cursor = await read_all(bus, cursor)
    assert [data[:2] for _, data in rest] == [b"a2", b"b2", b"d0", b"b3"]
    await bus.publish("a", 1, [b"a3"])
    assert (await read_all(bus, cursor))[0] == [("a", b"a3")]
