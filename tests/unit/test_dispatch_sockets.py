"""Dispatcher, membership, index and channel together, over real sockets on loopback."""

import asyncio
import time
from dataclasses import replace

import pytest

from warmroot.cluster.errors import OverloadedError
from warmroot.cluster.ids import Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import BlocksStored, CacheCleared, KvEventBatch, encode
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.router.channel_server import ChannelServer
from warmroot.router.dispatch import Dispatcher
from warmroot.router.membership import Membership
from warmroot.router.policy import make_policy

ROOT = namespace_root("m")
BLOCK = 16


class EchoReplica:
    """Answers a prompt with its own last tokens, one per step, and caches what it was asked."""

    def __init__(self, name, bus):
        self.bus, self.running, self.cached, self.seq, self.limit = bus, {}, set(), 0, 1000
        self.server = ChannelServer(self, "secret")
        self.info = ReplicaInfo(
            replica=ReplicaId(name),
            epoch=Epoch(1),
            model="m",
            address="",
            kv_namespace=ROOT,
            block_size=BLOCK,
            kv_total_blocks=10_000,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=4096,
            prefill_tokens_per_s=100.0,
            decode_step_s=0.01,
        )

    async def start(self):
        self.info = replace(self.info, address=await self.server.start("127.0.0.1"))
        await self.bus.heartbeat(self.info, 600.0)
        await self.publish(CacheCleared())
        self.loop = asyncio.ensure_future(self.steps())

    async def stop(self):
        self.loop.cancel()
        await self.server.close()

    def load(self):
        return Load(running=len(self.running), kv_total_blocks=10_000, max_num_seqs=64)

    def submit(self, request):
        if len(self.running) >= self.limit:
            raise OverloadedError("full", retry_after=1.0)
        hashes = chain(ROOT, request.prompt_token_ids, BLOCK)
        found = next((n for n, key in enumerate(hashes) if key not in self.cached), len(hashes))
        self.running[request.request_id] = [request, len(request.output_token_ids), found * BLOCK]

    def abort(self, request_id):
        self.running.pop(request_id, None)

    async def publish(self, *events):
        batch = encode(KvEventBatch(self.info.replica, self.info.epoch, self.seq, events))
        self.seq += 1
        await self.bus.publish(self.info.replica, 1, [batch])

    async def steps(self):
        while True:
            deltas = [self.advance(state) for state in list(self.running.values())]
            for delta in deltas:
                if delta.index == 0:
                    await self.store(self.running[delta.request_id][0].prompt_token_ids)
                if delta.finish_reason is not None:
                    self.running.pop(delta.request_id, None)
            self.server.push(deltas)
            await asyncio.sleep(0.001)

    def advance(self, state):
        request, index, cached = state
        state[1] += 1
        last = index + 1 == request.params.max_tokens
        return TokenDelta(
            request_id=request.request_id,
            index=index,
            token_ids=[request.prompt_token_ids[-1]],
            cached_tokens=None if index else cached,
            finish_reason=FinishReason.LENGTH if last else None,
        )

    async def store(self, tokens):
        hashes = chain(ROOT, tokens, BLOCK)
        if hashes:
            await self.publish(BlocksStored(ROOT, tuple(hashes), pack_tokens(tokens[: len(hashes) * BLOCK])))
            self.cached.update(hashes)


@pytest.fixture
async def cluster():
    bus = InMemoryBus(time.monotonic, "bus")
    replicas = [EchoReplica(name, bus) for name in ("a", "b", "c")]
    for replica in replicas:
        await replica.start()
    membership = Membership(bus, "secret")
    await membership.start()
    while len(membership.ready()) < len(replicas):
        await asyncio.sleep(0.005)
    yield membership, replicas
    await membership.close()
    for replica in replicas:
        await replica.stop()


def request(name, tokens, max_tokens=5):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=RequestId(name), prompt_token_ids=tokens, params=params)


async def collect(dispatcher, source):
    return [delta async for delta in dispatcher.generate(source)]


async def test_prompts_follow_their_prefixes(cluster):
    membership, _ = cluster
    dispatcher = Dispatcher(membership, make_policy())
    homes = {}
    for turn in range(6):
        for topic in range(6):
            tokens = [topic] * 160 + [turn, 1000 + topic]
            deltas = await collect(dispatcher, request(f"{topic}/{turn}", tokens))
            assert [token for delta in deltas for token in delta.token_ids] == [1000 + topic] * 5
            homes.setdefault(topic, set()).add(deltas[0].replica)
            assert deltas[0].cached_tokens == (160 if turn else 0)
    assert all(len(home) == 1 for home in homes.values())
    stats = dispatcher.routing()
    assert stats.actual_hit_tokens == 6 * 5 * 160
    assert stats.predicted_hit_tokens == stats.actual_hit_tokens


async def test_a_full_replica_sheds_to_the_others_and_all_full_is_told(cluster):
    membership, replicas = cluster
    dispatcher = Dispatcher(membership, make_policy("round_robin"))
    replicas[0].limit = replicas[1].limit = 0
    deltas = [await collect(dispatcher, request(str(n), [1, 2])) for n in range(3)]
    assert [d[0].replica for d in deltas] == ["c"] * 3
    replicas[2].limit = 0
    with pytest.raises(OverloadedError) as caught:
        await collect(dispatcher, request("x", [1, 2]))
    assert caught.value.retry_after == 1.0


async def test_the_streams_of_a_killed_replica_go_on_elsewhere_and_it_gets_no_more(cluster):
    membership, replicas = cluster
    dispatcher = Dispatcher(membership, make_policy("round_robin"))
    streams = [dispatcher.generate(request(str(n), [1, 2], max_tokens=10_000)) for n in range(3)]
    first = [await anext(stream) for stream in streams]
    assert sorted(delta.replica for delta in first) == ["a", "b", "c"]
    await replicas[0].stop()
    dead = streams[[delta.replica for delta in first].index("a")]
    news = [await anext(dead)]
    while news[-1].replica is None:  # what had come before the end
        news.append(await anext(dead))
    assert [delta.index for delta in news] == list(range(1, len(news) + 1))
    assert (news[-1].replica in ("b", "c"), news[-1].cached_tokens, news[-1].token_ids) == (True, None, [2])
    for n in range(4):
        assert (await collect(dispatcher, request(f"later{n}", [1, 2])))[0].replica in ("b", "c")
    for stream in streams:
        await stream.aclose()
    while any(replica.running for replica in replicas[1:]):
        await asyncio.sleep(0.002)


async def test_many_requests_and_random_leavers_leave_nothing_behind(cluster):
    membership, replicas = cluster
    dispatcher = Dispatcher(membership, make_policy())

    async def one(n):
        deltas = dispatcher.generate(request(str(n), [n % 7] * 40 + [n], max_tokens=1 + n % 9))
        async for delta in deltas:
            if n % 3 == 0 and delta.index >= n % 4:
                break
        await deltas.aclose()

    await asyncio.gather(*(one(n) for n in range(200)))
    while any(replica.running for replica in replicas):
        await asyncio.sleep(0.002)
    assert all(replica.server.owners == {} for replica in replicas)
    assert all(dispatcher.core.in_flight.unfinished(ReplicaId(name)) == 0 for name in "abc")
