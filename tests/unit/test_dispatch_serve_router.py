"""The Serve request router, without a cluster: Serve's side is faked."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve")

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.request_router.common import PendingRequest, ReplicaQueueLengthCache

from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.cluster.messages import ReplicaInfo
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import BlocksStored, CacheCleared, KvEventBatch, encode
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.router.serve_router import WarmrootRequestRouter, request_of

ROOT = namespace_root("m")
LONG = list(range(512))


def info(name):
    return ReplicaInfo(
        replica=ReplicaId(name),
        epoch=Epoch(1),
        model="m",
        address="",
        kv_namespace=ROOT,
        block_size=16,
        kv_total_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=4096,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )


def replica(name):
    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("d")), max_ongoing_requests=10)


def pending(*args, request_id="r", **kwargs):
    return PendingRequest(list(args), kwargs, SimpleNamespace(internal_request_id=request_id))


@pytest.fixture
async def bus():
    bus = InMemoryBus(time.monotonic, "bus")
    hashes = chain(ROOT, LONG, 16)
    for name in ("a", "b"):
        await bus.heartbeat(info(name), 60.0)
    events = (CacheCleared(), BlocksStored(ROOT, tuple(hashes), pack_tokens(LONG)))
    await bus.publish_snapshot("b", 1, encode(KvEventBatch(ReplicaId("b"), Epoch(1), 0, events)))
    return bus


@pytest.fixture
async def make(bus):
    routers = []

    async def find():
        return bus

    async def router(follow=True, **kwargs):
        router = object.__new__(WarmrootRequestRouter)
        router._replica_queue_len_cache = ReplicaQueueLengthCache()
        router.initialize_state(find_bus=find, **kwargs)
        routers.append(router)
        if follow:
            await router.choose_replicas([replica("a")])
            while len(router._known) < 2 or not router._index.blocks_of(ReplicaId("b")):
                await asyncio.sleep(0.002)
        return router

    yield router
    for router in routers:
        if router._follower is not None:
            router._follower.cancel()


def names(ranked):
    return [[r.replica_id.unique_id for r in group] for group in ranked]


@pytest.mark.parametrize(
    "call",
    [
        pending({"prompt_token_ids": LONG}),
        pending(SimpleNamespace(prompt_token_ids=LONG)),
        pending(request={"prompt_token_ids": LONG}),
        pending("other", {"prompt_token_ids": LONG}),
    ],
)
async def test_a_call_with_token_ids_goes_to_the_warm_replica(make, call):
    router = await make()
    ranked = await router.choose_replicas([replica("a"), replica("b"), replica("c")], call)
    assert names(ranked)[0] == ["b"]
    assert sorted(names(ranked)) == [["a"], ["b"], ["c"]]
    assert call.routing_context.should_backoff


@pytest.mark.parametrize(
    "call",
    [
        None,
        pending(),
        pending("text"),
        pending({"prompt_token_ids": None}),
        pending({"prompt_token_ids": "abc"}),
        pending({"prompt_token_ids": [2**70]}),
        pending({"prompt_token_ids": 5}),
    ],
)
async def test_any_other_call_goes_to_the_least_loaded(make, call):
    router = await make()
    replicas = [replica("a"), replica("b")]
    router.replica_queue_len_cache.update(replicas[0].replica_id, 5)
    assert names(await router.choose_replicas(replicas, call)) == [["b"], ["a"]]


async def test_it_never_raises_and_never_answers_nothing(make):
    router = await make(follow=False)

    class Broken:
        name = "broken"

        def choose(self, request, candidates):
            raise ZeroDivisionError

    class Empty:
        name = "empty"

        def choose(self, request, candidates):
            return []

    for policy in (Broken(), Empty()):
        router._core.policy = policy
        ranked = await router.choose_replicas([replica("a"), replica("b")], pending({"prompt_token_ids": LONG}))
        assert names(ranked) == [["a", "b"]]
    router._core = None
    router.on_request_routed(pending({"prompt_token_ids": LONG}), replica("a").replica_id, None)


class Answer:
    """As Serve's results: whoever asks when it is complete already is told at once, on another thread."""

    def __init__(self):
        self.done = threading.Event()

    def add_done_callback(self, callback):
        threading.Thread(target=lambda: (self.done.wait(), callback(None))).start()


async def idle(router, name):
    while router._core.in_flight.unfinished(ReplicaId(name)):
        await asyncio.sleep(0.002)


async def test_a_routed_prompt_counts_until_it_is_done(make):
    router, answer = await make(), Answer()
    fresh = [7] * 64
    call = pending({"prompt_token_ids": fresh})
    router.on_request_routed(call, replica("a").replica_id, answer)
    assert router._core.in_flight.unfinished(ReplicaId("a")) == 1
    for _ in range(5):
        again = pending({"prompt_token_ids": [*fresh, 8]})
        assert names(await router.choose_replicas([replica("a"), replica("b")], again))[0] == ["a"]
    answer.done.set()
    await idle(router, "a")


async def test_a_call_that_was_over_before_it_counted_does_not_count_for_ever(make):
    router, answer = await make(), Answer()
    call = pending({"prompt_token_ids": LONG})
    answer.done.set()
    router.on_request_completed(replica("a").replica_id, "r")
    router.on_request_routed(call, replica("a").replica_id, answer)
    await idle(router, "a")


async def test_a_rejected_attempt_takes_nothing_from_the_one_that_is_accepted(make):
    router, answer = await make(), Answer()
    call = pending({"prompt_token_ids": LONG})
    router.on_request_routed(call, replica("b").replica_id, answer)
    router.on_request_completed(replica("a").replica_id, "r")  # Serve tells late of the one it had cancelled
    assert router._core.in_flight.unfinished(ReplicaId("b")) == 1
    answer.done.set()
    await idle(router, "b")


async def test_a_result_that_cannot_tell_its_end_is_not_counted(make):
    router = await make()
    router.on_request_routed(pending({"prompt_token_ids": LONG}), replica("a").replica_id, None)
    assert router._core.in_flight.unfinished(ReplicaId("a")) == 0


async def test_without_a_bus_it_routes_all_the_same():
    async def find():
        return None

    router = object.__new__(WarmrootRequestRouter)
    router._replica_queue_len_cache = ReplicaQueueLengthCache()
    router.initialize_state("round_robin", find)
    chosen = [names(await router.choose_replicas([replica("a"), replica("b")], pending()))[0][0] for _ in range(4)]
    assert chosen == ["a", "b", "a", "b"]
    router._follower.cancel()


async def test_replicas_that_left_the_bus_are_forgotten(make, bus):
    router = await make()
    await bus.leave("b", 1)
    while ReplicaId("b") in router._known:
        await asyncio.sleep(0.002)
    assert router._index.blocks_of(ReplicaId("b")) == 0


async def test_a_session_of_the_handle_is_the_routers_session():
    metadata = SimpleNamespace(internal_request_id="r", session_id="s")
    for argument in ({"prompt_token_ids": [1, 2]}, {}):
        assert request_of(PendingRequest([argument], {}, metadata)).session == "s"
