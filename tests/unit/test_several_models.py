"""Several models behind one ingress: a router sees its own model's replicas, the API sees all of them."""

from dataclasses import replace

from bus_contract import replica_info
from manual_clock import ManualClock
from openai_harness import FakeCluster, Rig

from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import BlocksStored, CacheCleared, KvEventBatch, encode
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.bus_follower import BusFollower
from warmroot.router.openai.cluster_state import RoutingStats, StoreStatus
from warmroot.router.several_models import SeveralModels

TOKENS = list(range(32))


def snapshot(replica: str, model: str) -> bytes:
    root = namespace_root(model)
    blocks = BlocksStored(root, tuple(chain(root, TOKENS, 16)), pack_tokens(TOKENS))
    return encode(KvEventBatch(ReplicaId(replica), Epoch(1), 0, (CacheCleared(), blocks)))


async def test_a_router_follows_only_the_replicas_of_its_model():
    clock = ManualClock()
    bus = InMemoryBus(clock, "bus")
    for name, model in (("a", "m"), ("b", "other")):
        await bus.publish_snapshot(name, 1, snapshot(name, model))
        await bus.heartbeat(replace(replica_info(name), model=model), 5.0)
    index, seen = PrefixIndex(), []
    follower = BusFollower(bus, index, seen.append, clock, "m")
    await follower.follow_once(0.0)
    assert [[info.replica for info in infos] for infos in seen] == [["a"]]
    assert (index.blocks_of(ReplicaId("a")), index.blocks_of(ReplicaId("b"))) == (2, 0)
    await bus.publish_snapshot("b", 1, snapshot("b", "other"))  # a stranger from now on: it is not even read
    await follower.follow_once(0.0)
    assert index.blocks_of(ReplicaId("b")) == 0
    assert index.match(BlockHash(namespace_root("m")), pack_tokens(TOKENS), 16) == {"a": 32}


class State(FakeCluster):
    """Of one model."""

    def __init__(self, name: str, hits: int, fault: str = "") -> None:
        super().__init__()
        self.name, self.hits, self.fault = name, hits, fault

    def routing(self):
        return RoutingStats(decisions={("warm_prefix", "warm"): self.hits}, actual_hit_tokens=self.hits)

    def explain(self, request_id="", limit=1):
        return [f"{self.name}{number}" for number in range(3)][:limit]

    def store(self):
        return StoreStatus(store="redis://h", fault=self.fault, index_blocks=self.hits)


def test_the_states_of_models_are_put_together():
    states = [State("a", 3), State("b", 4, fault="away")]
    both = SeveralModels(states)
    assert len(both.replicas()) == sum(len(state.replicas()) for state in states)
    assert both.routing() == RoutingStats(decisions={("warm_prefix", "warm"): 7}, actual_hit_tokens=7)
    assert both.explain(limit=3) == ["a0", "b0", "a1"]
    assert both.store() == StoreStatus(store="redis://h", fault="away", index_blocks=7)
    assert SeveralModels([]).store() == StoreStatus()


async def test_a_model_that_is_not_up_yet_is_503_and_an_unknown_one_404():
    rig = Rig(served_names=("slow",))
    assert (await rig.chat(model="slow")).status_code == 503
    assert (await rig.chat(model="nope")).status_code == 404
