"""The contract of the event bus, and what is Redis' own, against a real redis-server."""

import itertools

import pytest
from bus_contract import BusContract, model_card, read_all, replica_info
from manual_clock import ManualClock
from redis_server import RedisServer, needs_redis

from warmroot.cluster.messages import StartupNote
from warmroot.cluster.metadata_store import parse_store
from warmroot.kv_store.redis_bus import RedisEventBus

pytestmark = needs_redis
PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def open_bus(server, clock):
    prefix, buses = f"test-{next(PREFIXES)}", []

    def opened(**options):
        buses.append(RedisEventBus(parse_store(f"{server.url}?prefix={prefix}"), clock, **options))
        return buses[-1]

    yield opened
    for bus in buses:
        await bus.close()


@pytest.fixture
def bus(open_bus):
    return open_bus()


@pytest.fixture
def advance(clock):
    async def seconds(amount):
        clock.now += amount

    return seconds


class TestRedisEventBus(BusContract):
    pass


async def test_two_processes_see_one_bus(open_bus):
    writer, reader = open_bus(), open_bus()
    await writer.heartbeat(replica_info(), 5.0)
    await writer.publish_snapshot("a", 1, b"s")
    assert (await read_all(reader, {}))[0] == [("a", b"s")]
    assert await reader.members() == [replica_info()]
    await reader.request_snapshot("a")
    assert await writer.heartbeat(replica_info(), 5.0)


async def test_clusters_with_other_prefixes_do_not_meet(server, open_bus):
    await open_bus().heartbeat(replica_info(), 5.0)
    other = RedisEventBus(parse_store(f"{server.url}?prefix=other"))
    try:
        assert await other.members() == []
    finally:
        await other.close()


async def test_a_new_reader_gets_the_first_of_every_stream_first(open_bus):
    writer = open_bus()
    for name in "abc":
        await writer.publish_snapshot(name, 1, *(f"{name}{part}".encode() for part in range(4)))
    reader = open_bus()
    entries, _ = await reader.read({}, 0.1)
    assert [entry.data for entry in entries] == [b"a0", b"b0", b"c0"]
    assert len((await read_all(reader, {}))[0]) == 12


async def test_a_long_stream_wants_a_snapshot_and_is_cut_without_one(open_bus):
    bus = open_bus(capacity_bytes=1000)
    await bus.publish_snapshot("a", 1, b"s" * 300)
    assert not await bus.publish("a", 1, [b"0" * 900])
    assert await bus.publish("a", 1, [b"1" * 200])
    for number in range(2, 12):
        await bus.publish("a", 1, [bytes([48 + number]) * 500])
    entries, _ = await read_all(bus, {})
    assert b"s" * 300 not in [data for _, data in entries]
    assert entries[-1] == ("a", b";" * 500)
    assert sum(len(data) for _, data in entries) <= 2500
    await bus.publish_snapshot("a", 1, b"t")
    assert not await bus.publish("a", 1, [b"x"])
    assert (await read_all(bus, {}))[0] == [("a", b"t"), ("a", b"x")]


async def test_an_emptied_redis_is_filled_again_and_readers_go_on(server, open_bus):
    writer, reader = open_bus(), open_bus()
    await writer.put_card(model_card())
    await writer.heartbeat(replica_info(), 5.0)
    await writer.publish_snapshot("a", 1, b"s")
    await writer.publish("a", 1, [b"0", b"1"])
    _, cursor = await read_all(reader, {})
    assert len(await reader.members()) == 1
    server.cli("flushall")
    assert [info.replica for info in await reader.members()] == ["a"]  # nobody has said that it is gone
    assert await writer.heartbeat(replica_info(), 5.0)
    assert await reader.card("m") == model_card()
    await writer.publish_snapshot("a", 1, b"t")
    assert [data for _, data in (await read_all(reader, cursor))[0]] == [b"t"]
    assert [data for _, data in (await read_all(open_bus(), {}))[0]] == [b"t"]


async def test_a_replica_that_redis_forgot_keeps_its_lease_and_no_longer(server, open_bus, clock):
    bus = open_bus()
    await bus.heartbeat(replica_info(), 5.0)
    assert len(await bus.members()) == 1
    server.cli("flushall")
    clock.now += 4.0
    assert len(await bus.members()) == 1
    clock.now += 2.0
    assert await bus.members() == []


async def test_a_strangers_entry_is_handed_on_as_garbage(server, open_bus):
    bus = open_bus()
    await bus.publish("a", 1, [b"0"])
    server.cli("xadd", bus._stream("a"), "*", "what", "ever")
    assert (await read_all(bus, {}))[0] == [("a", b"0"), ("a", b"")]


async def test_a_strangers_key_is_replaced(server, open_bus):
    bus = open_bus()
    await bus.heartbeat(replica_info(), 5.0)
    server.cli("set", bus._stream("a"), "nonsense")
    with pytest.raises(ConnectionError, match="WRONGTYPE"):
        await bus.read({}, 0.01)
    assert await bus.heartbeat(replica_info(), 5.0)
    await bus.publish_snapshot("a", 1, b"s")
    assert (await read_all(bus, {}))[0] == [("a", b"s")]


async def test_an_announcement_that_cannot_be_read_is_skipped_and_named(server, open_bus, caplog):
    bus = open_bus()
    await bus.heartbeat(replica_info("good"), 5.0)
    await bus.heartbeat(replica_info("bad"), 5.0)
    server.cli("hset", bus._record("bad"), "info", "junk")
    assert [info.replica for info in await bus.members()] == ["good"]
    assert "skipping the announcement of bad" in caplog.text


async def test_redis_keeps_nothing_for_ever(server, open_bus):
    bus = open_bus()
    await bus.heartbeat(replica_info(), 5.0)
    await bus.publish_snapshot("a", 1, b"s")
    await bus.put_card(model_card())
    await bus.report("a", StartupNote(stage="ready"))
    await bus.put_hot("r", [], 60.0)
    tag = bus._tag
    lasting = {key for key in server.cli("keys", f"{tag}:*").split() if server.cli("pttl", key) == "-1"}
    assert lasting == {f"{tag}:names", f"{tag}:hot"}  # names alone, which readers clear away
    server.cli("del", bus._record("a"), f"{tag}:hot:r")
    await bus.members()
    await bus.hot(1)
    assert server.cli("exists", *lasting) == "0"


async def test_clearing_leaves_no_key_behind(server, open_bus):
    bus = open_bus()
    await bus.heartbeat(replica_info(), 5.0)
    await bus.publish_snapshot("a", 1, b"s")
    await bus.put_card(model_card())
    await bus.put_hot("r", [], 60.0)
    await bus.clear()
    assert set(server.cli("keys", f"{bus._tag}:*").split()) <= {f"{bus._tag}:stream:"}


async def test_a_read_returns_about_as_much_as_it_should(open_bus):
    bus = open_bus(read_bytes=10_000)
    await bus.publish("a", 1, [b"x" * 1000 for _ in range(200)])
    cursor, sizes = {}, []
    while True:
        entries, cursor = await bus.read(cursor, 0.01)
        if not entries:
            break
        sizes.append(len(entries))
    assert sum(sizes) == 200
    assert sizes[0] == 1
    assert max(sizes) <= 16


async def test_a_redis_whose_clock_went_back_loses_no_replica(server, open_bus):
    bus = open_bus()
    await bus.heartbeat(replica_info(), 5.0)
    server.cli("xadd", bus._stream(""), "9999999999999-0", "joined", "a")
    _, cursor = await read_all(bus, {})
    server.cli("flushall")
    await bus.heartbeat(replica_info("b"), 5.0)
    await bus.publish_snapshot("b", 1, b"s")
    assert [info.replica for info in await bus.members()] == ["b"]
    assert (await read_all(bus, cursor))[0] == [("b", b"s")]


async def test_hundreds_of_replicas(open_bus):
    writer, reader = open_bus(), open_bus()
    for number in range(300):
        await writer.heartbeat(replica_info(f"r{number}"), 5.0)
        await writer.publish_snapshot(f"r{number}", 1, f"s{number}".encode())
    assert len(await reader.members()) == len(await reader.members()) == 300
    assert len((await read_all(reader, {}))[0]) == 300
