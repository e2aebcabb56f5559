"""What every ``EventBus`` must do. A test module derives from ``BusContract`` and provides the fixtures
``bus`` and ``advance`` (seconds: lets leases run out).
"""

import asyncio
import dataclasses

from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId
from warmroot.cluster.messages import ModelCard, RankInfo, ReplicaInfo, StartupNote
from warmroot.kv_store.bus import FROM_NOW
from warmroot.kv_store.hot_prefixes import HotPrefix


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


def model_card(model="m", names=("m", "alias")):
    return ModelCard(
        model=model,
        names=names,
        tokenizer={"kind": "gguf", "tokens": ["\u0120a", "b"], "scores": [0.5, -1.0], "data": b"\x00\xff"},
        max_model_len=2048,
        vocab_size=49152,
        token="secret",
        routing_policy="warm_prefix",
    )


def hot_prefix(tokens, heat):
    return HotPrefix(b"n" * 16, 16, tokens, heat)


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

    async def test_a_snapshot_may_have_several_parts(self, bus, advance):
        await bus.publish("a", 1, [b"0"])
        await bus.publish_snapshot("a", 1, b"s0", b"s1", b"s2")
        await bus.publish("a", 1, [b"1"])
        assert [data for _, data in (await read_all(bus, {}))[0]] == [b"s0", b"s1", b"s2", b"1"]

    async def test_a_reader_that_follows_reads_a_snapshot_after_what_it_replaces(self, bus, advance):
        await bus.publish("a", 1, [b"0"])
        _, cursor = await read_all(bus, {})
        await bus.publish_snapshot("a", 1, b"s")
        assert (await read_all(bus, cursor))[0] == [("a", b"s")]

    async def test_epochs_are_compared_to_the_last_digit(self, bus, advance):
        epoch = 1_796_000_000_123_456_789
        await bus.publish("a", epoch, [b"new"])
        assert not await bus.publish("a", epoch - 1, [b"old"])
        await bus.publish("a", epoch + 1, [b"newer"])
        assert (await read_all(bus, {}))[0] == [("a", b"newer")]

    async def test_members_show_the_ranks_of_a_gang(self, bus, advance):
        ranks = (RankInfo(rank=0, stage=0, host="h", pid=7, memory_bytes=2**40, last_step=3),)
        info = dataclasses.replace(replica_info(epoch=2**62 + 1), ranks=ranks)
        await bus.heartbeat(info, 5.0)
        assert await bus.members() == [info]

    async def test_who_has_left_may_come_back(self, bus, advance):
        await bus.heartbeat(replica_info(), 5.0)
        await bus.leave("a", 1)
        assert await bus.members() == []
        assert await bus.heartbeat(replica_info(epoch=2), 5.0)
        assert [info.epoch for info in await bus.members()] == [2]

    async def test_words_reach_all_who_listen_and_nobody_later(self, bus, advance):
        await bus.share(b"before")
        _, first = await bus.hear(FROM_NOW, 0.05)
        listening = asyncio.ensure_future(bus.hear(first, 5.0))
        await asyncio.sleep(0.02)
        await bus.share(b"1")
        words, first = await listening
        assert words == [b"1"]
        await bus.share(b"2")
        assert (await bus.hear(first, 5.0))[0] == [b"2"]

    async def test_nothing_said_is_nothing_heard(self, bus, advance):
        _, heard = await bus.hear(FROM_NOW, 0.01)
        assert await bus.hear(heard, 0.01) == ([], heard)

    async def test_hot_prefixes_of_all_sources_add_up(self, bus, advance):
        await bus.put_hot("r1", [hot_prefix(b"a" * 64, 5.0), hot_prefix(b"b" * 64, 4.0)], 60.0)
        await bus.put_hot("r2", [hot_prefix(b"b" * 64, 3.0), hot_prefix(b"c" * 64, 1.0)], 60.0)
        assert await bus.hot(2) == [hot_prefix(b"b" * 64, 7.0), hot_prefix(b"a" * 64, 5.0)]
        await bus.put_hot("r1", [], 60.0)
        assert [prefix.heat for prefix in await bus.hot(9)] == [3.0, 1.0]

    async def test_hot_prefixes_of_one_cache_take_no_place_of_anothers(self, bus, advance):
        busy = [hot_prefix(bytes([number]) * 64, 100.0 + number) for number in range(4)]
        quiet = dataclasses.replace(hot_prefix(b"q" * 64, 1.0), namespace=BlockHash(b"o" * 16))
        await bus.put_hot("r1", busy, 60.0)
        await bus.put_hot("r2", [quiet], 60.0)
        assert [prefix.heat for prefix in await bus.hot(2)] == [103.0, 102.0, 1.0]

    async def test_cards_are_found_by_any_name(self, bus, advance):
        assert await bus.card(None) is None
        await bus.put_card(model_card())
        assert await bus.card(None) == await bus.card("m") == await bus.card("alias") == model_card()
        assert await bus.card("other") is None
        await bus.put_card(model_card("n", ("n",)))
        assert await bus.card(None) is None
        assert await bus.card("n") == model_card("n", ("n",))

    async def test_the_latest_note_of_each_replica(self, bus, advance):
        await bus.report("a", StartupNote(stage="loading", done=1, total=2))
        await bus.report("a", StartupNote(stage="ready"))
        await bus.report("b", StartupNote(stage="failed", failed="no room"))
        notes = {"a": StartupNote(stage="ready"), "b": StartupNote(stage="failed", failed="no room")}
        assert await bus.notes() == notes

    async def test_clearing_forgets_everything(self, bus, advance):
        await bus.check()
        await bus.heartbeat(replica_info(), 5.0)
        await bus.publish_snapshot("a", 1, b"s")
        await bus.put_card(model_card())
        await bus.report("a", StartupNote(stage="ready"))
        await bus.put_hot("r", [hot_prefix(b"a" * 64, 5.0)], 60.0)
        await bus.clear()
        assert (await read_all(bus, {}))[0] == []
        assert (await bus.card(None), await bus.notes(), await bus.hot(9)) == (None, {}, [])
        assert await bus.heartbeat(replica_info(), 5.0)
