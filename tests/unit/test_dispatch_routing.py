"""Dispatcher, membership and index together, over fake replica clients and the in-memory bus."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from manual_clock import ManualClock

from warmroot.cluster.engine_counts import EngineCounts
from warmroot.cluster.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    ReplicaUnavailableError,
)
from warmroot.cluster.ids import Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import BlocksStored, CacheCleared, KvEventBatch, encode
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens, salted
from warmroot.router.dispatch import Dispatcher
from warmroot.router.late_binding import LateBinding
from warmroot.router.membership import Membership
from warmroot.router.openai.cluster_state import ReplicaState
from warmroot.router.policy import make_policy
from warmroot.router.policy.base import RoutingRequest

ROOT = namespace_root("m")
BLOCK = 16


class Stream:
    def __init__(self, script, client, request_id):
        self.script, self.client, self.request_id, self.ended = iter(script), client, request_id, False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await self.client.may_answer.wait()
        item = next(self.script, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            self.ended = True
            raise item
        self.ended = item.finish_reason is not None
        return item

    def close(self):
        if not self.ended:
            self.ended = True
            self.client.aborted.append(self.request_id)


class Client:
    def __init__(self, info, on_change):
        self.info, self.on_change = info, on_change
        self.load = Load(kv_total_blocks=1000, max_num_seqs=64)
        self.counts = EngineCounts()
        self.connected = self.draining = False
        self.requests, self.aborted, self.refuse, self.script, self.closed = [], [], None, None, False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def start(self):
        self.connect(True)

    def connect(self, connected):
        self.connected = connected
        self.on_change()

    async def close(self):
        self.closed, self.connected = True, False

    async def submit(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.refuse is not None:
            raise self.refuse
        script = self.script or [
            TokenDelta(request_id=request.request_id, index=0, token_ids=[7], cached_tokens=0),
            TokenDelta(request_id=request.request_id, index=1, token_ids=[8], finish_reason=FinishReason.STOP),
        ]
        return Stream(script, self, request.request_id)


class Cluster:
    """Replicas that speak by hand, and one router."""

    def __init__(self, policy="warm_prefix", wait_s=0.05, late=None):
        self.clock = ManualClock()
        self.bus = InMemoryBus(self.clock, "bus")
        self.clients = {}
        self.membership = Membership(self.bus, "", connect=self.connect, clock=self.clock)
        self.dispatcher = Dispatcher(
            self.membership, make_policy(policy, random.Random(0)), clock=self.clock, wait_s=wait_s, late=late
        )
        self.seqs = Counter()

    def connect(self, info, on_change):
        self.clients[info.replica] = Client(info, on_change)
        return self.clients[info.replica]

    def info(self, name, epoch=1, prefill=1000.0):
        return ReplicaInfo(
            replica=ReplicaId(name),
            epoch=Epoch(epoch),
            model="m",
            address=f"{name}:1",
            kv_namespace=ROOT,
            block_size=BLOCK,
            kv_total_blocks=1000,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=4096,
            prefill_tokens_per_s=prefill,
            decode_step_s=0.01,
        )

    async def join(self, *names, epoch=1):
        for name in names:
            await self.bus.heartbeat(self.info(name, epoch), 5.0)
        await self.follow()
        return [self.clients[name] for name in names]

    async def follow(self):
        self.clock.now += 0.6
        await self.membership.follower.follow_once(0.0)
        await self.membership.follower.follow_once(0.0)
        await asyncio.sleep(0)

    async def publish(self, name, *events, epoch=1, seq=None):
        seq = self.seqs[name] if seq is None else seq
        self.seqs[name] = seq + 1
        batch = encode(KvEventBatch(ReplicaId(name), Epoch(epoch), seq, events))
        if events and isinstance(events[0], CacheCleared):
            await self.bus.publish_snapshot(name, epoch, batch)
        else:
            await self.bus.publish(name, epoch, [batch])
        await self.follow()

    def stored(self, tokens, salt=""):
        root = salted(ROOT, salt)
        hashes = chain(root, tokens, BLOCK)
        return BlocksStored(root, tuple(hashes), pack_tokens(tokens[: len(hashes) * BLOCK]))

    async def run(self, tokens=(1, 2, 3), request_id="r", salt=""):
        return [delta async for delta in self.dispatcher.generate(request(tokens, request_id, salt))]

    def where(self):
        return {name: [r.request_id for r in client.requests] for name, client in self.clients.items()}


def request(tokens=(1, 2, 3), request_id="r", salt=""):
    return GenerateRequest(
        request_id=RequestId(request_id), prompt_token_ids=list(tokens), params=SamplingParams(), cache_salt=salt
    )


LONG = list(range(1024))


async def test_the_first_delta_says_who_computed_it():
    cluster = Cluster()
    await cluster.join("a")
    deltas = await cluster.run()
    assert [(d.replica, d.token_ids) for d in deltas] == [("a", [7]), (None, [8])]
    assert cluster.clients["a"].aborted == []
    assert cluster.dispatcher.core.in_flight.unfinished("a") == 0


@pytest.mark.parametrize(("limit", "expected"), [(16, 11), (2, 0), (None, math.inf)])
async def test_the_policy_knows_how_much_a_request_may_still_generate(limit, expected, monkeypatch):
    cluster, seen = Cluster("least_loaded"), []
    await cluster.join("a")
    choose = cluster.dispatcher.core.policy.choose
    monkeypatch.setattr(cluster.dispatcher.core.policy, "choose", lambda q, c: seen.append(q) or choose(q, c))
    resumed = replace(request(), params=SamplingParams(max_tokens=limit), output_token_ids=[4] * 5)
    assert [delta async for delta in cluster.dispatcher.generate(resumed)]
    assert [question.max_output for question in seen] == [expected]


async def test_replicas_of_a_kind_are_tried_whatever_luck_they_had_at_their_start():
    cluster = Cluster()
    for name, prefill in (("a", 229.0), ("b", 467.0), ("c", 300.0), ("slow", 30.0)):
        await cluster.bus.heartbeat(cluster.info(name, prefill=prefill), 60.0)
        await cluster.follow()
    rates = {member.info.replica: member.rates.prefill_tokens_per_s for member in cluster.membership.ready()}
    assert rates == {"a": 264.5, "b": 264.5, "c": 264.5, "slow": 30.0}
    for number in range(12):
        await cluster.run([number] * 64, str(number))
    assert all(cluster.where()[name] for name in "abc")


async def test_what_was_learned_of_a_kind_holds_for_those_that_join():
    cluster = Cluster()
    await cluster.join("a")
    cluster.membership.ready()[0].rates.observe_prefill(1000, 0.5)
    learned = cluster.membership.ready()[0].rates.prefill_tokens_per_s
    await cluster.bus.heartbeat(cluster.info("b", prefill=600.0), 60.0)
    await cluster.bus.heartbeat(cluster.info("a"), 60.0)
    await cluster.follow()
    rates = {member.info.replica: member.rates.prefill_tokens_per_s for member in cluster.membership.ready()}
    assert rates == {"a": learned, "b": learned}


async def test_a_request_goes_to_the_warm_replica_of_its_tenant():
    cluster = Cluster()
    await cluster.join("a", "b")
    await cluster.publish("a", cluster.stored(LONG))
    await cluster.publish("b", cluster.stored(LONG, salt="tenant"))
    await cluster.run(LONG, "plain")
    await cluster.run(LONG, "salted", salt="tenant")
    assert cluster.where() == {"a": ["plain"], "b": ["salted"]}
    decision = cluster.dispatcher.decisions[0]
    assert (decision.chosen.replica, decision.chosen.reason) == ("a", "warm")
    assert (decision.predicted_tokens, decision.actual_tokens, decision.cached) == (1024, 0, {"a": 1024, "b": 0})
    stats = cluster.dispatcher.routing()
    assert stats.decisions == {("warm_prefix", "warm"): 2}
    assert (stats.predicted_hit_tokens, stats.actual_hit_tokens, stats.best_hit_tokens) == (2048, 0, 2048)


async def test_a_burst_of_one_cold_prefix_lands_together():
    cluster = Cluster()
    clients = await cluster.join("a", "b", "c", "d")
    for client in clients:
        client.may_answer.clear()
    tasks = [asyncio.ensure_future(cluster.run([*LONG, n], f"r{n}")) for n in range(12)]
    await asyncio.sleep(0.05)
    assert sorted(map(len, cluster.where().values())) == [0, 0, 0, 12]
    for client in clients:
        client.may_answer.set()
    await asyncio.gather(*tasks)


async def test_a_burst_of_different_prompts_spreads():
    cluster = Cluster()
    clients = await cluster.join("a", "b", "c", "d")
    for client in clients:
        client.may_answer.clear()
    tasks = [asyncio.ensure_future(cluster.run([n, *LONG], f"r{n}")) for n in range(12)]
    await asyncio.sleep(0.05)
    assert sorted(map(len, cluster.where().values())) == [3, 3, 3, 3]
    for client in clients:
        client.may_answer.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("refusal", [OverloadedError("full", retry_after=3.0), ReplicaUnavailableError("gone")])
async def test_a_refusal_goes_to_the_next_best(refusal):
    cluster = Cluster()
    a, _ = await cluster.join("a", "b")
    await cluster.publish("a", cluster.stored(LONG))
    a.refuse = refusal
    assert (await cluster.run(LONG))[0].replica == "b"
    assert cluster.where() == {"a": ["r"], "b": ["r"]}
    assert cluster.dispatcher.decisions[-1].refusals == [refusal]
    assert cluster.dispatcher.routing().decisions == {("warm_prefix", "refused"): 1}
    assert cluster.dispatcher.core.in_flight.unfinished("a") == 0


async def test_a_replica_that_dies_before_the_first_delta_is_replaced_silently():
    cluster = Cluster()
    a, _ = await cluster.join("a", "b")
    await cluster.publish("a", cluster.stored(LONG))
    a.script = [ReplicaLostError("died")]
    assert [d.token_ids for d in await cluster.run(LONG)] == [[7], [8]]


async def test_a_request_that_fails_by_itself_is_not_tried_elsewhere():
    cluster = Cluster()
    a, b = await cluster.join("a", "b")
    await cluster.publish("a", cluster.stored(LONG))
    first = TokenDelta(request_id=RequestId("r"), index=0, token_ids=[7])
    for script in ([EngineError("broken")], [first, EngineError("broken")]):
        a.script = script
        with pytest.raises(EngineError, match="broken"):
            await cluster.run(LONG)
    assert b.requests == []
    assert cluster.dispatcher.core.in_flight.unfinished("a") == 0


async def test_when_all_are_full_the_shortest_wait_is_told():
    cluster = Cluster()
    a, b = await cluster.join("a", "b")
    a.refuse, b.refuse = OverloadedError("full", retry_after=3.0), OverloadedError("full", retry_after=2.0)
    with pytest.raises(OverloadedError) as caught:
        await cluster.run()
    assert caught.value.retry_after == 2.0


async def test_when_all_fail_the_failure_is_told():
    cluster = Cluster()
    (a,) = await cluster.join("a")
    a.refuse = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await cluster.run()


async def test_a_request_that_is_wrong_is_not_tried_elsewhere():
    cluster = Cluster()
    a, b = await cluster.join("a", "b")
    a.refuse = b.refuse = InvalidRequestError("wrong")
    with pytest.raises(InvalidRequestError):
        await cluster.run()
    assert len(a.requests) + len(b.requests) == 1
    with pytest.raises(InvalidRequestError):
        await cluster.run([2**40])


async def test_closing_the_generator_aborts_and_releases():
    cluster = Cluster()
    (a,) = await cluster.join("a")
    deltas = cluster.dispatcher.generate(request())
    await anext(deltas)
    assert cluster.dispatcher.core.in_flight.unfinished("a") == 1
    await deltas.aclose()
    assert (a.aborted, cluster.dispatcher.core.in_flight.unfinished("a")) == (["r"], 0)


async def test_cancelling_before_the_first_delta_aborts_and_releases():
    cluster = Cluster()
    (a,) = await cluster.join("a")
    a.may_answer.clear()
    task = asyncio.ensure_future(cluster.run())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (a.aborted, cluster.dispatcher.core.in_flight.unfinished("a")) == (["r"], 0)


async def test_a_request_waits_for_the_first_replica():
    cluster = Cluster(wait_s=20.0)
    task = asyncio.ensure_future(cluster.run())
    await asyncio.sleep(0.01)
    await cluster.join("a")
    assert len(await task) == 2


async def test_without_a_replica_it_gives_up():
    with pytest.raises(ReplicaUnavailableError, match="no replica is ready"):
        await Cluster().run()


async def test_rates_are_learned_from_an_idle_replica():
    cluster = Cluster()
    (a,) = await cluster.join("a")
    deltas = cluster.dispatcher.generate(request(LONG))
    a.may_answer.clear()
    task = asyncio.ensure_future(anext(deltas))
    await asyncio.sleep(0.01)
    cluster.clock.now += 0.512
    a.may_answer.set()
    await task
    (member,) = cluster.membership.ready()
    assert 1200 < member.rates.prefill_tokens_per_s < 2000
    await deltas.aclose()


async def test_a_lost_lease_drains_and_a_lost_connection_ends():
    cluster = Cluster()
    (a,) = await cluster.join("a")
    await cluster.publish("a", cluster.stored(LONG))
    await cluster.bus.leave("a", 1)
    await cluster.follow()
    assert [s.state for s in cluster.membership.replicas()] == [ReplicaState.DRAINING]
    assert cluster.membership.ready() == []
    a.connect(False)
    await cluster.follow()
    assert (cluster.membership.replicas(), a.closed) == ([], True)
    assert cluster.membership.index.blocks_of(ReplicaId("a")) == 0


async def test_a_broken_connection_gets_no_request_and_keeps_its_cache():
    cluster = Cluster()
    a, _ = await cluster.join("a", "b")
    await cluster.publish("a", cluster.stored(LONG))
    a.connect(False)
    assert (await cluster.run(LONG, "r1"))[0].replica == "b"
    a.connect(True)
    cluster.clock.now += 10
    assert (await cluster.run(LONG, "r2"))[0].replica == "a"


async def test_a_new_incarnation_replaces_the_old():
    cluster = Cluster()
    (old,) = await cluster.join("a")
    await cluster.publish("a", cluster.stored(LONG))
    (new,) = await cluster.join("a", epoch=2)
    await asyncio.sleep(0)
    assert (old.closed, new.closed, new is old) == (True, False, False)
    await cluster.publish("a", cluster.stored([5] * 16), epoch=2, seq=0)
    assert cluster.membership.index.blocks_of(ReplicaId("a")) == 1


async def test_a_gap_asks_for_a_snapshot_which_mends_it():
    cluster = Cluster()
    await cluster.join("a")
    await cluster.publish("a", CacheCleared())
    await cluster.publish("a", cluster.stored(LONG), seq=5)
    assert cluster.membership.follower.gaps == 1
    assert cluster.membership.index.blocks_of(ReplicaId("a")) == 0
    assert await cluster.bus.heartbeat(cluster.info("a"), 5.0)
    await cluster.publish("a", CacheCleared(), cluster.stored(LONG), seq=6)
    assert cluster.membership.index.blocks_of(ReplicaId("a")) == 64


@pytest.mark.parametrize("garbage", [b"", b"\xc1", encode(KvEventBatch(ReplicaId("b"), Epoch(1), 0, ()))])
async def test_garbage_on_the_bus_is_skipped_and_its_sender_resynced(garbage):
    cluster = Cluster()
    await cluster.join("a", "b")
    await cluster.publish("a", CacheCleared(), cluster.stored(LONG))
    await cluster.publish("b", CacheCleared(), cluster.stored(LONG))
    await cluster.bus.publish("a", 1, [garbage])
    await cluster.follow()
    assert cluster.membership.follower.skipped == 1
    assert [cluster.membership.index.blocks_of(ReplicaId(name)) for name in "ab"] == [0, 64]
    assert await cluster.bus.heartbeat(cluster.info("a"), 5.0)


async def test_an_unreachable_bus_changes_nothing():
    cluster = Cluster()
    await cluster.join("a")
    await cluster.publish("a", cluster.stored(LONG))
    reads = 0

    async def unreachable(cursor, timeout_s):
        nonlocal reads
        reads += 1
        raise ConnectionError("down")

    cluster.bus.read = unreachable
    await cluster.membership.start()
    await asyncio.sleep(0.01)
    assert reads == 1
    assert (await cluster.run(LONG))[0].replica == "a"
    await cluster.membership.close()


async def test_a_restarted_bus_is_followed_and_streams_live_on():
    cluster = Cluster()
    (a,) = await cluster.join("a")
    deltas = cluster.dispatcher.generate(request(LONG))
    await anext(deltas)
    cluster.membership.follower._bus = cluster.bus = InMemoryBus(cluster.clock, "bus-2")
    await cluster.follow()
    assert cluster.membership.ready() == []
    assert [d.token_ids async for d in deltas] == [[8]]
    await cluster.join("a")
    assert (a.closed, len(cluster.membership.ready())) == (False, 1)
    await cluster.publish("a", CacheCleared(), cluster.stored(LONG), seq=9)
    assert cluster.membership.index.blocks_of(ReplicaId("a")) == 64


async def test_a_resumed_request_is_matched_with_its_output():
    cluster = Cluster()
    await cluster.join("a", "b")
    await cluster.publish("a", cluster.stored(LONG))
    resumed = replace(request(LONG[:1000]), output_token_ids=LONG[1000:])
    [_ async for _ in cluster.dispatcher.generate(resumed)]
    assert cluster.dispatcher.decisions[-1].cached == {"a": 1024, "b": 0}


async def test_a_request_waits_in_the_router_while_all_are_busy():
    cluster = Cluster(late=LateBinding(backlog_s=0.4))
    clients = await cluster.join("a", "b")
    for client in clients:
        client.may_answer.clear()
    tasks = [asyncio.ensure_future(cluster.run([n, *LONG], f"r{n}")) for n in range(4)]
    await asyncio.sleep(0.01)
    assert sorted(map(len, cluster.where().values())) == [1, 1]
    assert cluster.dispatcher.core.num_waiting == 2
    for client in clients:
        client.may_answer.set()
    await asyncio.gather(*tasks)
    assert sorted(map(len, cluster.where().values())) == [2, 2]
    assert cluster.dispatcher.core.num_waiting == 0


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind():
    cluster = Cluster(late=LateBinding(backlog_s=0.4))
    (a,) = await cluster.join("a")
    a.may_answer.clear()
    first, second = (asyncio.ensure_future(cluster.run([n, *LONG], f"r{n}")) for n in range(2))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert cluster.dispatcher.core.num_waiting == 0
    a.may_answer.set()
    await first
    assert cluster.where() == {"a": ["r0"]}


async def test_a_line_that_empties_by_a_deadline_is_not_watched_any_more():
    cluster = Cluster(late=LateBinding(backlog_s=0.4))
    (a,) = await cluster.join("a")
    a.may_answer.clear()
    first = asyncio.ensure_future(cluster.run([0, *LONG], "r0"))
    await asyncio.sleep(0.01)
    core, clock = cluster.dispatcher.core, cluster.clock
    late = RoutingRequest(RequestId("late"), 1000, tokens=pack_tokens(LONG), deadline=clock.now + 60.0)
    ticket = core.submit(late, lambda ticket: None)
    assert core.num_waiting == 1
    clock.now += 61.0
    core.admission.rate.drained(50_000, clock.now)
    core.pump()
    assert isinstance(ticket.refused, DeadlineExceededError) and core.num_waiting == 0
    rate = core.admission.rate.per_s(100.0, clock.now)
    clock.now += 3600.0
    assert core.admission.rate.per_s(100.0, clock.now) == rate
    a.may_answer.set()
    await first


async def test_without_news_the_first_in_line_is_bound_all_the_same():
    cluster = Cluster(late=LateBinding(backlog_s=0.4, stall_s=5.0))
    (a,) = await cluster.join("a")
    a.may_answer.clear()
    tasks = [asyncio.ensure_future(cluster.run([n, *LONG], f"r{n}")) for n in range(3)]
    await asyncio.sleep(0.01)
    cluster.clock.now += 6.0
    cluster.dispatcher.core.pump()
    await asyncio.sleep(0.01)
    assert (len(a.requests), cluster.dispatcher.core.num_waiting) == (2, 1)
    a.may_answer.set()
    await asyncio.gather(*tasks)


async def test_who_is_ready_is_looked_at_only_when_it_changes():
    cluster = Cluster("least_loaded")
    a, b = await cluster.join("a", "b")
    ready = cluster.membership.ready()
    assert [member.info.replica for member in ready] == ["a", "b"]
    assert cluster.membership.ready() is ready
    a.load = Load(running=5, kv_total_blocks=1000, max_num_seqs=64)
    await cluster.run(request_id="1")
    a.load, b.load = b.load, a.load
    await cluster.run(request_id="2")
    a.connect(False)
    await cluster.run(request_id="3")
    assert cluster.where() == {"a": ["2"], "b": ["1", "3"]}


async def test_a_replica_that_contradicts_the_others_is_counted_and_named_once(caplog):
    cluster = Cluster()
    await cluster.join("a", "b")
    tokens = list(range(32))
    await cluster.publish("a", cluster.stored(tokens))
    for _ in range(2):
        await cluster.publish("b", BlocksStored(ROOT, (b"x" * 16, b"y" * 16), pack_tokens(tokens)))
    follower = cluster.membership.follower
    assert (follower.conflicts, follower.gaps, follower.skipped) == (2, 0, 0)
    assert [record.message for record in caplog.records if "contradicts" in record.message] == [
        "replica b contradicts what is known of equal tokens or hashes; leaving that out"
    ]
    assert cluster.membership.index.match(ROOT, pack_tokens(tokens), BLOCK) == {"a": 32}
