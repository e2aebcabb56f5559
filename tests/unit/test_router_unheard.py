"""A replica whose events do not come must not seem cold for ever, and somebody must be told."""

import pytest
from bus_contract import replica_info
from engine_deployment import BLOCK, PROMPT, Deployment
from manual_clock import ManualClock

from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import KvEventBatch, SnapshotPart, encode
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.bus_follower import SILENT_S, BusFollower
from warmroot.router.policy.base import Prefix
from warmroot.router.policy.in_flight import LINGER_S
from warmroot.router.unheard import ASK_EVERY_S, IN_A_ROW, Unheard

A, B = ReplicaId("a"), ReplicaId("b")
PROMPT_OF_40 = Prefix(BlockHash(b"r" * 16), BLOCK, bytes(160))


class Claims:
    """An index that knows what it is told."""

    def __init__(self):
        self.tokens = {}
        self.clock = ManualClock()
        self.unheard = Unheard(self.clock, lambda replica, prefix: self.tokens.get(replica, 0))

    def find(self, replica, cached_tokens, after=LINGER_S):
        self.unheard.found(replica, PROMPT_OF_40, cached_tokens)
        self.clock.now += after
        return self.unheard.silent()


def test_four_finds_that_nobody_heard_of_want_an_answer_and_then_not_for_a_while():
    claims = Claims()
    assert [claims.find(A, 16) for _ in range(IN_A_ROW)] == [[], [], [], [A]]
    assert [claims.find(A, 16) for _ in range(IN_A_ROW)] == [[]] * IN_A_ROW
    claims.clock.now += ASK_EVERY_S
    assert claims.find(A, 16) == [A]


def test_what_was_told_in_time_ends_the_row():
    claims = Claims()
    for _ in range(IN_A_ROW - 1):
        assert claims.find(A, 16) == []
    claims.unheard.found(A, PROMPT_OF_40, 16)
    claims.tokens[A] = 16  # its events come now
    claims.clock.now += LINGER_S
    assert claims.unheard.silent() == []
    claims.tokens[A] = 0
    assert [claims.find(A, 16) for _ in range(IN_A_ROW)] == [[], [], [], [A]]


@pytest.mark.parametrize(("claimed", "found"), [(16, 16), (16, 19), (20, 12), (0, 3), (0, 0)])
def test_what_is_known_or_less_than_a_block_proves_nothing(claimed, found):
    claims = Claims()
    claims.tokens[A] = claimed
    assert [claims.find(A, found) for _ in range(2 * IN_A_ROW)] == [[]] * 2 * IN_A_ROW


def test_moments_are_not_waited_for_and_replicas_are_judged_apart():
    claims = Claims()
    assert [claims.find(A, 16, after=0.01) for _ in range(20)] == [[]] * 20
    assert claims.find(B, 16, after=0.5) == []
    claims.clock.now += LINGER_S
    assert claims.unheard.silent() == [A]


@pytest.fixture
async def followed():
    clock = ManualClock()
    bus = InMemoryBus(clock, "bus")
    follower = BusFollower(bus, PrefixIndex(), lambda infos: None, clock)
    await bus.heartbeat(replica_info("a"), 1000.0)
    return bus, follower, clock


async def look(follower, clock, seconds):
    clock.now += seconds
    await follower.follow_once(0.0)


async def test_a_replica_without_any_event_is_asked_and_told_of(followed, caplog):
    bus, follower, clock = followed
    await bus.publish_snapshot("a", 1)  # the bus wants nothing: it was told that there is nothing
    for seconds in (1.0, SILENT_S - 0.1):
        await look(follower, clock, seconds)
    assert (follower.silent, await bus.publish("a", 1, [])) == (set(), False)
    for _ in range(3):
        await look(follower, clock, 1.0)
    assert (follower.silent, await bus.publish("a", 1, [])) == ({A}, True)
    assert caplog.text.count("replica a lives but does not tell what it has cached") == 1
    await bus.publish_snapshot("a", 1, encode(KvEventBatch(A, Epoch(1), 7, (SnapshotPart(0),))))
    await look(follower, clock, 1.0)
    await look(follower, clock, 1.0)
    assert (follower.silent, await bus.publish("a", 1, [])) == (set(), False)


async def test_a_new_incarnation_that_says_nothing_is_not_taken_for_the_old_one(followed):
    bus, follower, clock = followed
    await bus.publish_snapshot("a", 1, encode(KvEventBatch(A, Epoch(1), 0, (SnapshotPart(0),))))
    await look(follower, clock, 1.0)
    await look(follower, clock, 2 * SILENT_S)
    assert follower.silent == set()
    await bus.heartbeat(replica_info("a", epoch=2), 1000.0)
    await look(follower, clock, 1.0)
    await look(follower, clock, 2 * SILENT_S)
    await look(follower, clock, 1.0)
    assert follower.silent == {A}


async def test_a_publisher_that_stops_without_a_gap_is_noticed_by_what_its_replica_finds(caplog):
    """Events are lost where they are made: no sequence number tells."""
    deployment = Deployment()
    await deployment.follow()
    await deployment.drain("r1")
    replica = deployment.replicas["r0"]
    engine, index = replica.harness.engine, deployment.membership.index
    publish, replica.publish = replica.publish, _nothing
    prompts = [f"{number} {PROMPT}" for number in range(IN_A_ROW)]
    for prompt in prompts * 2:  # computed, then found
        await deployment.ask("sk", prompt=prompt)
    assert (index.blocks_of(ReplicaId("r0")), deployment.membership.store().resyncs) == (0, 0)
    await deployment.ask("sk", prompt="another")
    assert deployment.membership.store().resyncs == 1
    assert "replica r0 does not tell what it has cached" in caplog.text
    assert await deployment.bus.publish("r0", 1, [])  # a snapshot is wanted
    engine.drain_events()
    events = (SnapshotPart(0), *engine.snapshot_events())
    await deployment.bus.publish_snapshot("r0", 1, encode(KvEventBatch(ReplicaId("r0"), Epoch(1), 99, events)))
    replica.seq, replica.publish = 100, publish
    await deployment.follow()
    assert index.blocks_of(ReplicaId("r0")) > 4 * IN_A_ROW
    for prompt in prompts:
        assert (await deployment.ask("sk", prompt=prompt))[1] == len(prompt) - 1
        assert deployment.dispatcher.decisions[-1].predicted_tokens >= len(prompt) - BLOCK
    assert deployment.membership.store().resyncs == 1


async def _nothing():
    pass
