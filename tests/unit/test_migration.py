"""Requests outlive their replicas: over real sockets, with engines whose every token is known."""

import asyncio
import itertools
import time
from dataclasses import replace

import pytest
from engine_harness import expected_output
from migration_harness import VOCAB, MigratingCluster, check_whole, ends_with, request, scripted_engine
from polling import until

from warmroot.actors.draining import drain
from warmroot.cluster.errors import DeadlineExceededError, OverloadedError, PoisonRequestError, ReplicaUnavailableError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router import channel_client, channel_server, silence
from warmroot.router.channel_client import ChannelClient
from warmroot.router.dispatch import Dispatcher
from warmroot.router.membership import Membership
from warmroot.router.policy import make_policy

PROMPT = [1, 2, 3, 4, 5, 6]
EXPECTED = expected_output(PROMPT, 12, VOCAB)
WAYS = {"kill": "connection", "fail": "engine", "hand_back": "draining"}


def at(count, way):
    """Lose a replica once it has sent so many tokens of a request."""

    def lose(replica):
        if max(replica.sent.values(), default=0) == count:
            replica.sent.clear()
            getattr(replica, way)()

    return lose


@pytest.mark.parametrize("way", WAYS)
async def test_a_replica_may_be_lost_at_any_token(way):
    for count in range(1, 12):
        async with MigratingCluster() as cluster:
            await cluster.start("a", on_step=at(count, way))
            await cluster.ready("a")
            task = asyncio.ensure_future(cluster.run(request()))
            await until(lambda: cluster.replicas["a"].taken)
            await cluster.start("b")
            deltas = await asyncio.wait_for(task, 20)
            assert check_whole(deltas) == EXPECTED
            assert [d.replica for d in deltas if d.replica] == ["a", "b"]
            (resumed,) = cluster.replicas["b"].taken
            assert resumed.output_token_ids == EXPECTED[: len(resumed.output_token_ids)]
            assert 0 < len(resumed.output_token_ids) <= count and resumed.age > 0
            stats = cluster.dispatcher.routing()
            assert stats.migrations == {WAYS[way]: 1}
            assert stats.recomputed_tokens == len(PROMPT) + len(resumed.output_token_ids)
            assert stats.decisions["warm_prefix", "moved"] == 1
            await cluster.check_clean()


async def test_before_the_first_token_the_next_best_takes_it():
    async with MigratingCluster("a", "b") as cluster:
        for replica in cluster.replicas.values():
            replica.stop_computing()
        task = asyncio.ensure_future(cluster.run(request()))
        await until(lambda: any(replica.taken for replica in cluster.replicas.values()))
        first, other = sorted(cluster.replicas.values(), key=lambda replica: not replica.taken)
        other.loop = asyncio.ensure_future(other.steps())
        first.kill()
        deltas = await task
        assert check_whole(deltas) == EXPECTED
        assert (deltas[0].replica, other.taken[0].output_token_ids) == (other.info.replica, [])
        assert other.taken[0].age > 0
        assert cluster.dispatcher.routing().recomputed_tokens == 0


async def test_it_moves_as_often_as_it_must():
    async with MigratingCluster(max_losses=3) as cluster:
        for name in "ab":
            await cluster.start(name, on_step=at(4, "kill"))
        for name in "cde":
            await cluster.start(name, on_step=at(2, "hand_back"))
        await cluster.ready(*"abcde")
        task = asyncio.ensure_future(cluster.run(request()))
        await until(lambda: all(replica.taken for replica in cluster.replicas.values()) or task.done())
        await cluster.start("f")
        deltas = await task
        assert check_whole(deltas) == EXPECTED
        assert len([d.replica for d in deltas if d.replica]) >= 2


async def test_what_may_have_killed_three_replicas_is_not_given_a_fourth():
    async with MigratingCluster() as cluster:
        for name in "abcd":
            await cluster.start(name, on_step=at(1, "fail"))
        await cluster.ready(*"abcd")
        error = await ends_with(cluster.run(request()))
        assert isinstance(error, PoisonRequestError)
        assert sum(bool(replica.taken) for replica in cluster.replicas.values()) == 3
        await cluster.check_clean()
        (left,) = cluster.membership.ready()
        cluster.replicas[left.info.replica].on_step = lambda replica: None
        assert check_whole(await cluster.run(request("other")), "other") == EXPECTED


def dies_of(name):
    """A replica that is lost whenever it has computed a token of that request."""

    def lose(replica):
        if any(one.partition("~")[0] == name for one in replica.sent):
            replica.fail()

    return lose


async def replaced(cluster, on_step):
    """As Serve does: a new replica for each that was lost."""
    for number in itertools.count(1):
        await until(lambda: not any(replica.alive for replica in cluster.replicas.values()))
        await asyncio.sleep(0.02)
        await cluster.start(f"again-{number}", on_step=on_step)


async def test_innocent_requests_are_told_from_the_one_that_kills():
    names = ["poison", *(f"innocent-{number}" for number in range(5))]
    async with MigratingCluster(wait_s=20.0) as cluster:
        kills = dies_of("poison")
        await cluster.start("first", on_step=kills)
        await cluster.ready("first")
        again = asyncio.ensure_future(replaced(cluster, kills))
        runs = [cluster.run(request(name)) for name in names]
        poison, *others = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)
        again.cancel()
        assert isinstance(poison, PoisonRequestError)
        for name, deltas in zip(names[1:], others, strict=True):
            assert check_whole(deltas, name) == EXPECTED
        assert len(cluster.started) in (3, 4)  # the last one is not needed if the poison was the last to go
        # All were there twice as it died; then each had a replica for itself.
        assert cluster.dispatcher.routing().migrations["engine"] in range(2 * len(names) + 1, 2 * len(names) + 2)


async def test_suspects_run_beside_each_other_where_there_are_replicas_for_it():
    async with MigratingCluster("a", "b", "c", policy="round_robin", max_losses=2) as cluster:
        for replica in cluster.replicas.values():
            replica.step_s = 0.005
        tasks = [asyncio.ensure_future(cluster.run(request(f"r{number}", max_tokens=60))) for number in range(6)]
        await until(lambda: all(len(replica.sent) == 2 for replica in cluster.replicas.values()))
        cluster.replicas["a"].fail()
        done = await asyncio.wait_for(asyncio.gather(*tasks), 20)
        for number, deltas in enumerate(done):
            assert check_whole(deltas, f"r{number}") == expected_output(PROMPT, 60, VOCAB)
        moved = {next(d.replica for d in reversed(deltas) if d.replica) for deltas in done if deltas[0].replica == "a"}
        assert moved == {"b", "c"}


async def two_suspects(cluster, other):
    """Replica "a" is lost with both; the first of them finds another one before the second does."""
    (a,) = cluster.replicas.values()
    a.step_s = 0.01
    tasks = []
    for source in (request("first", max_tokens=150), other):
        tasks.append(asyncio.ensure_future(cluster.run(source)))
        await until(lambda source=source: a.sent.get(source.request_id))
    b = await cluster.start("b")
    b.step_s = 0.005
    return *tasks, a, b


async def test_a_suspect_waits_for_a_replica_of_its_own_until_its_deadline():
    async with MigratingCluster("a", max_losses=2, wait_s=20.0) as cluster:
        deadline = time.time() + 3.0
        first, second, a, b = await two_suspects(cluster, replace(request("r", max_tokens=900), deadline=deadline))
        await cluster.ready("a", "b")
        a.fail()
        await until(lambda: b.taken)
        b.step_s = 0.1  # it has more to do than it can before that deadline
        error = await asyncio.wait_for(ends_with(second), 20)
        assert isinstance(error, DeadlineExceededError) and "suspects" in error.message
        b.step_s = 0.0
        assert check_whole(await asyncio.wait_for(first, 20), "first") == expected_output(PROMPT, 150, VOCAB)
        assert [one.request_id for one in b.taken] == ["first~1"]


async def test_a_suspect_that_waited_for_another_one_is_not_given_up_at_the_first_refusal():
    async with MigratingCluster("a", max_losses=2, wait_s=1.0) as cluster:
        first, second, a, b = await two_suspects(cluster, request("r", max_tokens=40))
        await cluster.ready("a", "b")
        a.fail()
        await until(lambda: b.taken)
        b.step_s = 0.02
        await asyncio.sleep(1.5)  # longer than a request waits for a replica that takes it
        theirs = RequestId("theirs")
        b.server.suspects.add(theirs)
        assert check_whole(await asyncio.wait_for(first, 20), "first") == expected_output(PROMPT, 150, VOCAB)
        await asyncio.sleep(0.2)  # it is refused
        b.server.suspects.discard(theirs)
        assert check_whole(await asyncio.wait_for(second, 20), "r") == expected_output(PROMPT, 40, VOCAB)


async def test_a_suspect_does_not_go_where_it_has_no_room_but_waits():
    async with MigratingCluster("a", max_losses=2, wait_s=20.0) as cluster:
        first, second, a, b = await two_suspects(cluster, request("r", max_tokens=40))
        small = await cluster.start("small", scripted_engine(max_model_len=20), max_model_len=20)
        await cluster.ready("a", "b", "small")
        a.fail()
        assert check_whole(await asyncio.wait_for(second, 20), "r") == expected_output(PROMPT, 40, VOCAB)
        assert check_whole(await first, "first") == expected_output(PROMPT, 150, VOCAB)
        assert [one.request_id for one in b.taken] == ["first~1", "r~1"] and not small.taken


async def test_suspects_of_several_routers_are_not_together_on_a_replica():
    async with MigratingCluster("a", max_losses=2, wait_s=20.0) as cluster:
        membership = Membership(cluster.bus, "secret")
        await membership.start()
        await until(membership.ready)
        theirs = Dispatcher(membership, make_policy("warm_prefix"), max_losses=2, wait_s=20.0)
        (a,) = cluster.replicas.values()
        a.step_s = 0.01
        runs = [
            asyncio.ensure_future(cluster_rest(router.generate(request(name, max_tokens=60))))
            for router, name in ((cluster.dispatcher, "ours"), (theirs, "theirs"))
        ]
        await until(lambda: len(a.sent) == 2)
        (await cluster.start("b")).step_s = 0.005
        await until(lambda: len(membership.ready()) == len(cluster.membership.ready()) == 2)
        a.fail()
        for name, run in zip(("ours", "theirs"), runs, strict=True):
            assert check_whole(await asyncio.wait_for(run, 20), name) == expected_output(PROMPT, 60, VOCAB)
        b = cluster.replicas["b"]
        assert {one.request_id for one in b.taken} == {"ours~1", "theirs~1"} and b.most_suspects == 1
        assert not b.server.suspects
        await membership.close()


async def test_it_goes_on_where_there_is_room_for_all_of_it():
    async with MigratingCluster("a") as cluster:
        await cluster.start("small", scripted_engine(max_model_len=20), max_model_len=20)
        await cluster.ready("a", "small")
        cluster.replicas["a"].step_s = 0.01
        stream = cluster.dispatcher.generate(request(max_tokens=40))
        deltas = [await anext(stream)]
        cluster.replicas["a"].kill()
        rest = asyncio.ensure_future(cluster_rest(stream))
        await asyncio.sleep(0.3)
        assert not rest.done()
        await cluster.start("large")
        deltas += await asyncio.wait_for(rest, 20)
        assert check_whole(deltas) == expected_output(PROMPT, 40, VOCAB)
        assert [d.replica for d in deltas if d.replica] == ["a", "large"]
        assert not cluster.replicas["small"].taken


async def test_it_waits_for_a_replica_and_not_for_ever():
    async with MigratingCluster("a", wait_s=20.0) as cluster:
        stream = cluster.dispatcher.generate(request())
        deltas = [await anext(stream)]
        cluster.replicas["a"].kill()
        rest = asyncio.ensure_future(cluster_rest(stream))
        await asyncio.sleep(0.05)
        await cluster.start("b")
        assert check_whole(deltas + await rest) == EXPECTED
    async with MigratingCluster("a", wait_s=0.1) as cluster:
        stream = cluster.dispatcher.generate(request())
        await anext(stream)
        cluster.replicas["a"].kill()
        error = await ends_with(cluster_rest(stream))
        assert isinstance(error, ReplicaUnavailableError) and "waited 0.1 s" in error.message


async def test_it_does_not_wait_beyond_its_deadline():
    async with MigratingCluster("a", wait_s=20.0) as cluster:
        stream = cluster.dispatcher.generate(replace(request(max_tokens=500), deadline=time.time() + 0.2))
        await anext(stream)
        cluster.replicas["a"].kill()
        error = await ends_with(cluster_rest(stream))
        assert isinstance(error, DeadlineExceededError) and "no replica was ready" in error.message


async def cluster_rest(stream):
    return [delta async for delta in stream]


async def test_a_connection_that_breaks_leads_back_to_the_same_replica():
    async with MigratingCluster("a", wait_s=20.0) as cluster:
        (a,) = cluster.replicas.values()
        stream = cluster.dispatcher.generate(request(max_tokens=40))
        deltas = [await anext(stream)]
        for connection in list(a.server._connections):
            connection.cut()
        deltas += await cluster_rest(stream)
        assert check_whole(deltas) == expected_output(PROMPT, 40, VOCAB)
        assert [one.request_id for one in a.taken] == ["r", "r~1"]
        assert deltas[0].cached_tokens == 0
        # What it had computed was still cached.
        assert cluster.dispatcher.routing().recomputed_tokens < len(PROMPT) + len(a.taken[1].output_token_ids)
        await cluster.check_clean()


async def test_a_full_replica_takes_what_another_had_accepted():
    async with MigratingCluster("a", policy="round_robin") as cluster:
        stream = cluster.dispatcher.generate(request(max_tokens=40))
        await anext(stream)
        cluster.replicas["a"].stop_computing()  # or it might end there, however long the rest takes
        b = await cluster.start("b", scripted_engine(max_num_seqs=1, max_num_queued_reqs=1))
        b.stop_computing()
        b.engine.add(request("runs"))
        b.engine.step()
        await asyncio.sleep(0.5)  # its way to the other replica makes a request a little younger
        b.engine.add(request("waits"))
        await cluster.ready("a", "b")
        cluster.replicas["a"].kill()
        rest = asyncio.ensure_future(cluster_rest(stream))
        await until(lambda: b.taken)
        assert isinstance(await ends_with(cluster.run(request("new"))), OverloadedError)
        # It goes before the one that waits: it came earlier.
        assert [waiting.id for waiting in b.engine.scheduler.waiting] == ["r~1", "waits"]
        b.loop = asyncio.ensure_future(b.steps())
        assert (await rest)[-1].finish_reason is FinishReason.LENGTH


class FrozenLink:
    """A connection between router and replica that may be cut without a word to either."""

    def __init__(self, address):
        self.host, self.port = address.split(":")
        self.through = asyncio.Event()
        self.through.set()

    async def start(self):
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return ":".join(map(str, self.listener.sockets[0].getsockname()))

    async def serve(self, reader, writer):
        theirs, ours = await asyncio.open_connection(self.host, int(self.port))
        await asyncio.gather(self.forward(reader, ours), self.forward(theirs, writer), return_exceptions=True)

    async def forward(self, reader, writer):
        while data := await reader.read(65536):
            await self.through.wait()
            writer.write(data)
        await self.through.wait()
        writer.close()


async def test_a_replica_that_was_cut_off_and_comes_back_disturbs_nobody(monkeypatch):
    for module, name in ((channel_client, "PING_S"), (channel_server, "PING_S")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(silence, "LEAST_S", 0.2)
    monkeypatch.setattr(silence, "MOST_S", 0.4)
    async with MigratingCluster("a") as cluster:
        a = cluster.replicas["a"]
        link = FrozenLink(a.info.address)
        await a.leave()
        await cluster.ready()
        a.info = replace(a.info, address=await link.start(), epoch=a.info.epoch + 1)
        await cluster.bus.heartbeat(a.info, 600.0)
        await cluster.ready("a")
        a.step_s = 0.01
        stream = cluster.dispatcher.generate(request(max_tokens=400))
        deltas = [await anext(stream)]
        b = await cluster.start("b")
        await cluster.ready("a", "b")
        link.through.clear()
        deltas += await cluster_rest(stream)
        assert check_whole(deltas) == expected_output(PROMPT, 400, VOCAB)
        assert cluster.dispatcher.routing().migrations == {"silence": 1}
        # No word of the end reaches it, but it hears nothing either.
        await until(lambda: a.is_clean)
        link.through.set()
        await cluster.ready("a", "b")
        b.kill()
        assert check_whole(await cluster.run(request("next")), "next") == EXPECTED
        link.listener.close()


async def test_many_streams_move_at_once_and_nothing_is_left_behind():
    async with MigratingCluster("a", "b", "c", policy="round_robin") as cluster:
        for replica in cluster.replicas.values():
            replica.step_s = 0.002
        prompts = [[number % 5, 7, number, 9, 9] for number in range(30)]
        sources = [request(str(number), prompt, max_tokens=60) for number, prompt in enumerate(prompts)]
        tasks = [asyncio.ensure_future(cluster.run(source)) for source in sources]
        await until(lambda: all(len(replica.sent) >= 5 for replica in cluster.replicas.values()))
        cluster.replicas["a"].kill()
        await asyncio.sleep(0.02)
        cluster.replicas["b"].fail()
        for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            assert check_whole(await task, str(number)) == expected_output(prompt, 60, VOCAB)
        await cluster.check_clean()
        assert set(cluster.dispatcher.routing().migrations) == {"connection", "engine"}


async def test_a_request_that_moves_counts_once():
    async with MigratingCluster() as cluster:
        prompt = [*range(40)]
        warm = await cluster.start("a")
        await cluster.ready("a")
        await cluster.run(request("before", prompt))
        warm.on_step = at(6, "kill")
        warm.sent.clear()
        task = asyncio.ensure_future(cluster.run(request("r", prompt)))
        await until(lambda: len(warm.taken) == 2)
        await cluster.start("b")
        first = (await task)[0]
        assert first.cached_tokens == 39
        stats = cluster.dispatcher.routing()
        assert stats.actual_hit_tokens == 39
        assert sum(stats.decisions.values()) == 3 and stats.decisions["warm_prefix", "moved"] == 1
        assert [served.tokens for served in cluster.dispatcher.heat._served] == [pack_tokens(prompt[:36])]


async def test_closing_a_stream_that_has_moved_aborts_it_where_it_is():
    async with MigratingCluster("a") as cluster:
        stream = cluster.dispatcher.generate(request(max_tokens=500))
        await anext(stream)
        b = await cluster.start("b")
        await cluster.ready("a", "b")
        cluster.replicas["a"].kill()
        while (await anext(stream)).replica != "b":
            pass
        await stream.aclose()
        await cluster.check_clean()
        assert b.taken[0].request_id == "r~1"


async def drained(replica, has_others, grace_s):
    async def others():
        return has_others

    replica.server.drain()
    await drain(replica.server, replica.engine.remaining, others, grace_s)


async def test_a_draining_replica_keeps_what_ends_soon_and_hands_back_the_rest():
    async with MigratingCluster("a") as cluster:
        a = cluster.replicas["a"]
        a.step_s = 0.01
        short, long = (
            asyncio.ensure_future(cluster.run(request(name, max_tokens=count)))
            for name, count in (("short", 20), ("long", 900))
        )
        await until(lambda: len(a.sent) == 2)
        b = await cluster.start("b")
        await cluster.ready("a", "b")
        await drained(a, has_others=True, grace_s=10.0)
        await cluster.ready("b")
        assert check_whole(await short, "short") == expected_output(PROMPT, 20, VOCAB)
        assert check_whole(await long, "long") == expected_output(PROMPT, 900, VOCAB)
        assert [one.request_id for one in b.taken] == ["long~1"]
        assert await cluster.run(request("new")) and b.taken[-1].request_id == "new"
        assert cluster.dispatcher.routing().migrations == {"draining": 1}


async def test_alone_it_keeps_all_until_the_end():
    async with MigratingCluster("a", wait_s=20.0) as cluster:
        a = cluster.replicas["a"]
        a.step_s = 0.005
        task = asyncio.ensure_future(cluster.run(request(max_tokens=900)))
        await until(lambda: a.sent)
        await drained(a, has_others=False, grace_s=1.0)
        assert a.is_clean and not task.done()
        await cluster.start("b")
        assert check_whole(await task) == expected_output(PROMPT, 900, VOCAB)


async def test_an_idle_replica_leaves_at_once():
    async with MigratingCluster("a") as cluster:
        await drained(cluster.replicas["a"], has_others=True, grace_s=600.0)
        await cluster.ready()


async def test_a_draining_replica_says_so_to_who_connects():
    async with MigratingCluster("a") as cluster:
        a = cluster.replicas["a"]
        a.server.drain()
        late = Membership(cluster.bus, "secret")
        await late.start()
        await until(lambda: [status.state.value for status in late.replicas()] == ["draining"])
        client = ChannelClient(a.info, "secret")
        client.start()
        await until(lambda: client.draining)
        error = await ends_with(client.submit(request()))
        assert isinstance(error, ReplicaUnavailableError) and "about to stop" in error.message
        await client.close()
        await late.close()
