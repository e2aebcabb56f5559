"""A stream of prompts that nobody repeats: a router keeps what replicas hold and what is in flight, and no more."""

import random
from collections import deque
from types import SimpleNamespace

import pytest
from manual_clock import ManualClock

from warmroot.cluster.ids import Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import Load, ReplicaInfo
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, KvEventBatch
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens, salted
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.core import RoutingCore
from warmroot.router.policy import RoutingRequest, make_policy
from warmroot.router.policy.rates import Kind, ReplicaRates

BLOCK = 4
ROOT = namespace_root("m")


class Replica:
    """Holds the latest prompts, and tells what comes and goes, one batch a prompt."""

    def __init__(self, name, capacity):
        self.name, self.capacity, self.seq, self.prompts = ReplicaId(name), capacity, 0, deque()

    def compute(self, root, tokens):
        hashes = tuple(chain(root, tokens, BLOCK))
        self.prompts.append(hashes)
        gone = [BlocksRemoved(self.prompts.popleft()[::-1])] if len(self.prompts) > self.capacity else []
        batch = KvEventBatch(self.name, Epoch(1), self.seq, (BlocksStored(root, hashes, pack_tokens(tokens)), *gone))
        self.seq += 1
        return batch


def stream(index, num_prompts, salts=1):
    rng, replicas = random.Random(0), [Replica(f"r{n}", 100) for n in range(4)]
    roots = [ROOT] if salts == 1 else None
    for number in range(num_prompts):
        root = roots[0] if roots else salted(ROOT, str(number))
        tokens = [rng.getrandbits(20) for _ in range(2 * BLOCK)]
        index.apply(replicas[number % 4].compute(root, tokens))
    return sum(len(hashes) for replica in replicas for hashes in replica.prompts)


@pytest.mark.parametrize("num_prompts", [40_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_the_index_holds_what_replicas_hold(num_prompts):
    index = PrefixIndex()
    held = stream(index, num_prompts)
    assert index.num_blocks == held == 4 * 100 * 2
    assert len(index._nodes) <= 4 * 101 + 1
    assert len(index._where._buckets) <= 64
    assert sum(map(len, index._where._buckets)) == 12 * held


def test_so_it_does_when_every_prompt_has_a_namespace_of_its_own():
    index = PrefixIndex()
    held = stream(index, 10_000, salts=0)
    assert (index.num_blocks, len(index.roots)) == (held, 400)


def test_what_is_in_flight_is_forgotten_when_it_has_landed():
    clock = ManualClock()
    core = RoutingCore(PrefixIndex(), make_policy(rng=random.Random(0)), clock, history=8)
    for name in "ab":
        core.join(SimpleNamespace(info=info(name), load=Load(max_num_seqs=64), rates=ReplicaRates(Kind(1000.0, 0.01))))
    flying = deque()
    for number in range(5000):
        clock.now += 0.1
        tokens = pack_tokens([number * 8 + n for n in range(8)])
        request = RoutingRequest(RequestId(str(number)), 8, tokens=tokens, salt=str(number % 50))
        flying.append(core.submit(request, lambda ticket: None))
        if len(flying) > 5:
            core.first_token(flying[0], 0)
            core.finish(flying.popleft())
    prefixes = core.in_flight._prefixes
    # Five that fly and ten that linger for a second.
    assert sum(len(root.children) for root in prefixes._roots.values()) <= 5 + 10 + 2
    assert len(core.in_flight._lingering) <= 12 and len(core.decisions) == 8
    while flying:
        core.finish(flying.popleft())
    clock.now += 10.0
    core.candidates(RoutingRequest(RequestId("last"), 1, tokens=pack_tokens([1])))
    assert len(prefixes) == 0


def info(name):
    return ReplicaInfo(
        replica=ReplicaId(name),
        epoch=Epoch(1),
        model="m",
        address=name,
        kv_namespace=ROOT,
        block_size=BLOCK,
        kv_total_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=4096,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )


def test_one_huge_batch():
    index, tokens = PrefixIndex(), list(range(4 * 100_000))
    hashes = tuple(chain(ROOT, tokens, BLOCK))
    index.apply(KvEventBatch(ReplicaId("a"), Epoch(1), 0, (BlocksStored(ROOT, hashes, pack_tokens(tokens)),)))
    assert index.match(ROOT, pack_tokens(tokens[:-1]), BLOCK) == {"a": len(tokens) - BLOCK}
    index.apply(KvEventBatch(ReplicaId("a"), Epoch(1), 1, (BlocksRemoved(hashes[:-6:-1]),)))
    assert index.match(ROOT, pack_tokens(tokens), BLOCK) == {"a": len(tokens) - 5 * BLOCK}
