"""What every ``EventBus`` must do. A test module derives from ``BusContract`` and provides the fixtures
``bus`` and ``advance`` (seconds: lets leases run out).
"""

import asyncio

from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.cluster.messages import ReplicaInfo


def replica_info(name="a", epoch=1, address="127.0.0.1:1"):
    return ReplicaInfo(
        replica=ReplicaId(name),
        epoch=Epoch(epoch),
        model="m",
        address=address,
        kv_namespace=b"n" * 16,
        block_size=16,
        kv_total_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=2048,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )


async def read_all(bus, cursor):
    entries = []
    while True:
        more, cursor = await bus.read(cursor, 0.01)
        if not more:
            return [(entry.replica, entry.data) for entry in entries], cursor
        entries += more


class BusContract:
    async def test_reads_what_was_published_in_order(self, bus, advance):
        await bus.publish("a", 1, [b"0", b"1"])
        await bus.publish("b", 1, [b"x"])
        await bus.publish("a", 1, [b"2"])
        entries, cursor = await read_all(bus, {})
        assert [data for replica, data in entries if replica == "a"] == [b"0", b"1", b"2"]
        assert ("b", b"x") in entries
        assert (await read_all(bus, cursor))[0] == []
        await bus.publish("b", 1, [b"y"])
        assert (await read_all(bus, cursor))[0] == [("b", b"y")]

    async def test_two_readers_do_not_disturb_each_other(self, bus, advance):
        await bus.publish("a", 1, [b"0"])
        first, _ = await read_all(bus, {})
        second, _ = await read_all(bus, {})
        assert first == second == [("a", b"0")]

    async def test_a_waiting_reader_wakes_on_news(self, bus, advance):
        _, cursor = await read_all(bus, {})
        reader = asyncio.ensure_future(bus.read(cursor, 30.0))
        await asyncio.sleep(0.01)
        assert not reader.done()
        await bus.publish("a", 1, [b"0"])
        entries, _ = await asyncio.wait_for(reader, 10)
        assert [tuple(entry) for entry in entries] == [("a", b"0")]

    async def test_a_read_without_news_times_out_empty(self, bus, advance):
        entries, cursor = await bus.read({}, 0.01)
        assert entries == []
        assert await bus.read(cursor, 0.01) == ([], cursor)

    async def test_a_late_reader_gets_the_snapshot_and_what_followed(self, bus, advance):
        await bus.publish("a", 1, [b"0", b"1"])
        await bus.publish_snapshot("a", 1, b"snapshot")
        await bus.publish("a", 1, [b"2"])
        assert (await read_all(bus, {}))[0] == [("a", b"snapshot"), ("a", b"2")]

    async def test_a_snapshot_is_wanted_first_and_on_request(self, bus, advance):
        assert await bus.heartbeat(replica_info(), 5.0)
        await bus.publish_snapshot("a", 1, b"s")
        assert not await bus.heartbeat(replica_info(), 5.0)
        assert not await bus.publish("a", 1, [b"0"])
        await bus.request_snapshot("a")
        assert await bus.publish("a", 1, [b"1"])
        assert await bus.heartbeat(replica_info(), 5.0)
        await bus.publish_snapshot("a", 1, b"s")
        assert not await bus.heartbeat(replica_info(), 5.0)

    async def test_a_request_for_an_unknown_replica_is_no_error(self, bus, advance):
        await bus.request_snapshot("nobody")

    async def test_words_of_the_dead_are_dropped(self, bus, advance):
        await bus.publish("a", 2, [b"new"])
        assert not await bus.publish("a", 1, [b"old"])
        await bus.publish_snapshot("a", 1, b"old")
        assert not await bus.heartbeat(replica_info(epoch=1), 5.0)
        assert await bus.members() == []
        assert (await read_all(bus, {}))[0] == [("a", b"new")]

    async def test_a_new_epoch_begins_its_stream_anew(self, bus, advance):
        await bus.publish("a", 1, [b"old"])
        await bus.publish("a", 2, [b"new"])
        assert (await read_all(bus, {}))[0] == [("a", b"new")]

    async def test_a_lease_holds_until_it_runs_out(self, bus, advance):
        await bus.heartbeat(replica_info("a"), 5.0)
        await bus.heartbeat(replica_info("b"), 50.0)
        assert sorted(info.replica for info in await bus.members()) == ["a", "b"]
        await advance(3.0)
        await bus.heartbeat(replica_info("a"), 5.0)
        await advance(3.0)
        assert sorted(info.replica for info in await bus.members()) == ["a", "b"]
        await advance(6.0)
        assert [info.replica for info in await bus.members()] == ["b"]

    async def test_members_show_what_was_announced_last(self, bus, advance):
        await bus.heartbeat(replica_info(address="127.0.0.1:1"), 5.0)
        await bus.heartbeat(replica_info(address="127.0.0.1:2"), 5.0)
        assert await bus.members() == [replica_info(address="127.0.0.1:2")]

    async def test_joining_and_leaving_wake_readers(self, bus, advance):
        _, cursor = await read_all(bus, {})
        reader = asyncio.ensure_future(bus.read(cursor, 30.0))
        await asyncio.sleep(0.01)
        await bus.heartbeat(replica_info(), 5.0)
        await asyncio.wait_for(reader, 10)
        reader = asyncio.ensure_future(bus.read(cursor, 30.0))
        await asyncio.sleep(0.01)
        await bus.leave("a", 1)
        await asyncio.wait_for(reader, 10)
        assert await bus.members() == []

    async def test_only_its_own_or_a_newer_epoch_ends_a_lease(self, bus, advance):
        await bus.heartbeat(replica_info(epoch=2), 5.0)
        await bus.leave("a", 1)
        assert [info.epoch for info in await bus.members()] == [2]
