"""What the index claims of a replica, held against what the replica finds."""

from math import exp

import pytest
from engine_deployment import BLOCK, PROMPT, Deployment
from manual_clock import ManualClock

from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId
from warmroot.kv_store.events import BlocksStored, KvEventBatch, SnapshotPart, encode
from warmroot.kv_store.hashing import chain, pack_tokens
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.trust import RECOVERY_S, RESYNC_EVERY_S, Trust, TrustedIndex

A, B, C = map(ReplicaId, "abc")
ROOT = BlockHash(b"r" * 16)
TOKENS = list(range(40))


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def trust(clock):
    return Trust(clock)


def test_who_keeps_its_word_is_believed(trust):
    assert not any(trust.observe(A, 160, actual) for actual in (160, 170, 160))
    assert trust.doubted() == {}


def test_one_failure_is_forgiven_and_two_are_not_quite(trust):
    assert not trust.observe(A, 160, 80)
    assert trust.doubted() == {}
    assert not trust.observe(A, 160, 80)
    assert trust.doubted() == {A: pytest.approx(0.9 - 0.2 * 0.4)}


def test_four_in_a_row_want_a_resync_and_then_not_for_a_while(trust, clock):
    assert [trust.observe(A, 160, 0) for _ in range(6)] == [False, False, False, True, False, False]
    clock.now += RESYNC_EVERY_S
    assert trust.observe(A, 160, 0)
    assert not trust.observe(B, 160, 0)


def test_doubts_fade_and_good_requests_end_them(trust, clock):
    for _ in range(3):
        trust.observe(A, 160, 0)
    assert trust.doubted() == {A: pytest.approx(0.512)}
    clock.now += RECOVERY_S
    assert trust.doubted() == {A: pytest.approx(1 - 0.488 * exp(-1))}
    trust.observe(A, 160, 160)
    trust.observe(A, 160, 160)
    trust.observe(A, 160, 160)
    assert trust.doubted() == {}


@pytest.fixture
def index():
    made = PrefixIndex()
    for name, count in ((A, 40), (B, 40), (C, 16)):
        hashes = chain(ROOT, TOKENS[:count], BLOCK)
        event = BlocksStored(ROOT, tuple(hashes), pack_tokens(TOKENS[:count]))
        made.apply(KvEventBatch(name, Epoch(1), 0, (event,)))
    return made


def test_claims_of_who_is_in_doubt_are_discounted(index, trust):
    trusted, tokens = TrustedIndex(index, trust), pack_tokens(TOKENS)
    assert trusted.slots.by_name(trusted.held(ROOT, tokens, BLOCK)) == {A: 40, B: 40, C: 16}
    for _ in range(3):
        trust.observe(B, 40, 0)
        trust.observe(ReplicaId("gone"), 40, 0)
    assert trusted.slots.by_name(trusted.held(ROOT, tokens, BLOCK)) == {A: 40, B: int(40 * 0.512), C: 16}


def test_a_claim_is_what_a_replica_can_find(index, trust):
    trusted, tokens = TrustedIndex(index, trust), pack_tokens(TOKENS)
    for _ in range(2):  # looked up anew, and remembered
        # the last token is always computed, so the last block cannot be found whole
        assert [trusted.claimed(name, ROOT, tokens, BLOCK) for name in (A, C, ReplicaId("gone"))] == [36, 16, 0]
        trusted.held(ROOT, tokens, BLOCK)
    trusted.held(ROOT, pack_tokens([9] * 40), BLOCK)
    assert trusted.claimed(A, ROOT, tokens, BLOCK) == 36
    assert trusted.claimed(A, BlockHash(b"s" * 16), tokens, BLOCK) == 0
    longer = pack_tokens([*TOKENS, 1])
    assert trusted.claimed(A, ROOT, longer, BLOCK) == 40


async def test_a_replica_that_forgot_without_a_word_is_resynced(caplog):
    deployment = Deployment()
    await deployment.follow()
    await deployment.drain("r1")
    prompts = [f"{number} {PROMPT}" for number in range(5)]
    for prompt in prompts:
        await deployment.ask("sk", prompt=prompt)
    engine, index = deployment.replicas["r0"].harness.engine, deployment.membership.index
    engine.cache.clear()
    engine.drain_events()
    resyncs = []
    for prompt in prompts[:4]:
        assert await deployment.ask("sk", prompt=prompt) == ("r0", 0)
        resyncs.append(deployment.membership.store().resyncs)
    assert resyncs == [0, 0, 0, 1]
    assert "replica r0 lacks what the index claims of it" in caplog.text
    assert index.blocks_of(ReplicaId("r0")) == 0
    assert await deployment.bus.publish("r0", 1, [])  # a snapshot is wanted
    events = (SnapshotPart(0), *engine.snapshot_events())
    await deployment.bus.publish_snapshot("r0", 1, encode(KvEventBatch(ReplicaId("r0"), Epoch(1), 99, events)))
    deployment.replicas["r0"].seq = 100
    await deployment.follow()
    for prompt in prompts[:4]:
        assert (await deployment.ask("sk", prompt=prompt))[1] == len(prompt) - 1
    assert deployment.membership.store().resyncs == 1


async def test_a_prefix_that_is_only_in_flight_proves_nothing(monkeypatch):
    deployment = Deployment()
    await deployment.follow()
    monkeypatch.setattr(deployment, "follow", _nothing)  # no event arrives, and no time passes
    for _ in range(6):
        assert (await deployment.ask("sk"))[1] == 0
        for replica in deployment.replicas.values():
            replica.harness.engine.cache.clear()
    latest = deployment.dispatcher.decisions[-1]
    assert (latest.predicted_tokens, latest.actual_tokens) == (16, 0)
    assert deployment.membership.store().resyncs == 0


async def _nothing():
    pass
