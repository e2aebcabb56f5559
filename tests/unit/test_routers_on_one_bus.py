"""Several routers, and several models, that follow one bus: those that start late, and those that mind their own."""

import random
from dataclasses import replace

import pytest
from bus_contract import model_card, replica_info
from manual_clock import ManualClock

from warmroot.cluster.engine_counts import EngineCounts
from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import Load
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import BlocksStored, KvEventBatch, SnapshotPart, encode
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.router.dispatch import Dispatcher
from warmroot.router.membership import Membership
from warmroot.router.policy import RoutingRequest, make_policy

BLOCK = 16
PROMPT = list(range(20 * BLOCK))
MODELS = {"m": namespace_root("m"), "other": namespace_root("other")}


class Client:
    connected, draining = True, False
    load = Load(kv_total_blocks=1000, max_num_seqs=64)
    counts = EngineCounts()

    def start(self):
        pass

    async def close(self):
        pass


class Router:
    """Membership and dispatcher as an ingress has them."""

    def __init__(self, bus, clock, model=None, name=""):
        self.clock = clock
        self.membership = Membership(bus, "", connect=lambda info, on_change: Client(), clock=clock, model=model)
        self.dispatcher = Dispatcher(self.membership, make_policy(rng=random.Random(0)), clock=clock)
        self.dispatcher.core.peers.name = name

    async def follow(self):
        self.clock.now += 1.0
        for _ in range(3):
            await self.membership.follower.follow_once(0.0)
        return self.dispatcher.sync()

    def cached(self, tokens):
        core = self.dispatcher.sync()
        found = core.candidates(RoutingRequest(RequestId("q"), len(tokens), tokens=pack_tokens(tokens)))
        return dict(zip(found.names, map(int, found.cached_tokens), strict=True))


class Replica:
    def __init__(self, bus, name, model="m"):
        self.bus, self.seq = bus, 0
        self.info = replace(replica_info(name), model=model, kv_namespace=MODELS[model], block_size=BLOCK)

    async def beat(self):
        return await self.bus.heartbeat(self.info, 1000.0)

    async def store(self, tokens, parent=None, snapshot=False):
        root = parent or BlockHash(self.info.kv_namespace)
        event = BlocksStored(root, tuple(chain(root, tokens, BLOCK)), pack_tokens(tokens))
        events = (SnapshotPart(0), event) if snapshot else (event,)
        data = encode(KvEventBatch(self.info.replica, Epoch(1), self.seq, events))
        self.seq += 1
        if snapshot:
            await self.bus.publish_snapshot(self.info.replica, 1, data)
        else:
            await self.bus.publish(self.info.replica, 1, [data])
        return event.hashes[-1]


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def bus(clock):
    return InMemoryBus(clock, "bus")


async def test_a_router_that_starts_late_knows_what_the_others_know(bus, clock):
    """llm-d-router #1892, Dynamo #7072: not an empty index, and not only what is new."""
    a, b = Replica(bus, "a"), Replica(bus, "b")
    early = Router(bus, clock, name="early")
    for replica in (a, b):
        await replica.beat()
    await b.store([9] * BLOCK)
    end = await a.store(PROMPT)
    await early.follow()
    await a.store([7] * BLOCK, parent=end)
    await early.follow()
    late = Router(bus, clock, name="late")
    await late.follow()
    expected = {"a": 21 * BLOCK, "b": 0}
    assert early.cached([*PROMPT, *[7] * BLOCK]) == late.cached([*PROMPT, *[7] * BLOCK]) == expected
    await late.follow()
    assert late.membership.follower.gaps == 0


async def test_it_learns_of_old_roots_where_the_stream_was_cut(bus, clock):
    """Dynamo #11194: children whose parents it never saw are not all that it will ever know."""
    replica = Replica(bus, "a")
    await replica.beat()
    end = await replica.store(PROMPT)
    bus._streams["a"].entries.clear()  # trimmed, as a full stream is
    await replica.store([7] * BLOCK, parent=end)
    late = Router(bus, clock)
    await late.follow()
    assert late.cached([*PROMPT, *[7] * BLOCK]) == {"a": 0}
    assert await replica.beat()  # it is asked for a snapshot
    await replica.store([*PROMPT, *[7] * BLOCK], snapshot=True)
    await late.follow()
    assert late.cached([*PROMPT, *[7] * BLOCK]) == {"a": 21 * BLOCK}


async def test_it_counts_what_the_others_have_under_way(bus, clock):
    replicas = [Replica(bus, name) for name in "ab"]
    for replica in replicas:
        await replica.beat()
    early, late = Router(bus, clock, name="early"), Router(bus, clock, name="late")
    core = await early.follow()
    await late.follow()
    core.peers.hear(late.dispatcher.core.peers.word(everything=True))
    tickets = [
        core.submit(RoutingRequest(RequestId(str(n)), 320, tokens=pack_tokens(PROMPT)), lambda ticket: None)
        for n in range(3)
    ]
    (busy,) = {ticket.replica for ticket in tickets}
    late.dispatcher.core.peers.hear(core.peers.word(everything=True))
    other = [5] * 320
    question = RoutingRequest(RequestId("q"), 320, tokens=pack_tokens(other))
    assert late.dispatcher.sync().choose(question)[1].best.replica != busy
    for ticket in tickets:
        core.finish(ticket)
    late.dispatcher.core.peers.hear(core.peers.word(everything=True))
    assert not late.dispatcher.core.peers._totals


async def test_models_on_one_bus_do_not_meet(bus, clock):
    """Ray #58835: one index for all deployments collides; here each router keeps to the replicas of its model."""
    one, two = Replica(bus, "a", "m"), Replica(bus, "b", "other")
    for replica in (one, two):
        await replica.beat()
        await replica.store(PROMPT)  # equal tokens: only the namespace tells them apart
    routers = {model: Router(bus, clock, model) for model in MODELS}
    for router in routers.values():
        await router.follow()
        await router.follow()
    assert routers["m"].cached(PROMPT) == {"a": len(PROMPT)}
    assert routers["other"].cached(PROMPT) == {"b": len(PROMPT)}
    assert routers["m"].membership.index.blocks_of(ReplicaId("b")) == 0
    assert [status.info.model for status in routers["other"].dispatcher.replicas()] == ["other"]
    for replica in (one, two):
        await replica.store([3] * BLOCK)
    for router in routers.values():
        await router.follow()
    assert routers["m"].cached([3] * BLOCK) == {"a": BLOCK}
    store = routers["m"].dispatcher.store()
    assert (store.gaps, store.skipped, store.conflicts, store.silent) == (0, 0, 0, 0)


async def test_whoever_sees_all_models_keeps_their_prefixes_apart(bus, clock):
    """As plain Serve handles do."""
    one, two = Replica(bus, "a", "m"), Replica(bus, "b", "other")
    for replica in (one, two):
        await replica.beat()
    await one.store(PROMPT)
    await two.store(PROMPT[: 3 * BLOCK])
    router = Router(bus, clock)
    await router.follow()
    index, tokens = router.membership.index, pack_tokens(PROMPT)
    assert index.match(MODELS["m"], tokens, BLOCK) == {"a": len(PROMPT)}
    assert index.match(MODELS["other"], tokens, BLOCK) == {"b": 3 * BLOCK}


async def test_cards_of_several_models_are_found_by_name(bus):
    await bus.put_card(model_card("m", ("m", "alias")))
    await bus.put_card(model_card("other", ("other",)))
    assert await bus.card(None) is None
    assert [(await bus.card(name)).model for name in ("alias", "other")] == ["m", "other"]
