"""Replicas and routers of one process around a real redis-server: everything but the engine and Ray."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from redis_server import RedisServer

from warmroot.actors.event_publisher import EventPublisher
from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from warmroot.cluster.metadata_store import parse_store
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, KvEvent
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.kv_store.redis_bus import RedisEventBus
from warmroot.router.channel_server import ChannelServer
from warmroot.router.dispatch import Dispatcher
from warmroot.router.membership import Membership
from warmroot.router.peer_exchange import PeerExchange
from warmroot.router.policy import make_policy

ROOT = namespace_root("m")
BLOCK = 16


def open_bus(server: RedisServer, **options: Any) -> RedisEventBus:
    address = parse_store(server.url)
    assert address is not None
    return RedisEventBus(address, **options)


class CachingReplica:
    """Answers every prompt with one token at once, and caches its blocks for ever."""

    def __init__(self, server: RedisServer, name: str, epoch: int = 1) -> None:
        """An epoch is the wall clock of the replica's machine."""
        self.bus = open_bus(server)
        self.name, self.epoch = ReplicaId(name), Epoch(epoch)
        self.channel = ChannelServer(self, "secret")
        self.stored: dict[BlockHash, BlocksStored] = {}
        self.snapshots = 0

    async def start(self) -> "CachingReplica":
        self.loop = asyncio.get_running_loop()
        self.info = ReplicaInfo(
            replica=self.name,
            epoch=self.epoch,
            model="m",
            address=await self.channel.start("127.0.0.1"),
            kv_namespace=ROOT,
            block_size=BLOCK,
            kv_total_blocks=100_000,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=4096,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
        )
        self.publisher = EventPublisher(self.bus, self.info, self.snapshot)
        await self.publisher.start()
        return self

    async def stop(self) -> None:
        await self.publisher.close()
        await self.die()

    async def die(self) -> None:
        """Without a word, as a killed process does."""
        for task in self.publisher._tasks:
            task.cancel()
        await self.channel.close()
        await self.bus.close()

    async def snapshot(self) -> list[KvEvent]:
        self.snapshots += 1
        return list(self.stored.values())

    def store(self, tokens: list[int]) -> int:
        """Cache a prompt; returns how many of its tokens were cached before."""
        hashes = chain(ROOT, tokens, BLOCK)
        known = next((n for n, key in enumerate(hashes) if key not in self.stored), len(hashes))
        fresh: list[KvEvent] = []
        for n in range(known, len(hashes)):
            packed = pack_tokens(tokens[n * BLOCK : (n + 1) * BLOCK])
            event = self.stored[hashes[n]] = BlocksStored(hashes[n - 1] if n else ROOT, (hashes[n],), packed)
            fresh.append(event)
        if fresh:
            self.publisher.add(fresh)
        return known * BLOCK

    def evict(self, tokens: list[int]) -> None:
        hashes = tuple(reversed(chain(ROOT, tokens, BLOCK)))
        for key in hashes:
            del self.stored[key]
        self.publisher.add([BlocksRemoved(hashes)])

    def load(self) -> Load:
        return Load(kv_total_blocks=100_000, max_num_seqs=64)

    def submit(self, request: GenerateRequest) -> None:
        cached = self.store(request.prompt_token_ids)
        delta = TokenDelta(
            request_id=request.request_id,
            index=0,
            token_ids=[7],
            cached_tokens=cached,
            finish_reason=FinishReason.LENGTH,
        )
        self.loop.call_soon(self.channel.push, [delta])

    def abort(self, request_id: RequestId) -> None:
        pass


class Router:
    """An ingress without HTTP."""

    def __init__(
        self, server: RedisServer, name: str = "router", policy: str = "warm_prefix", ahead_s: float = 0.0
    ) -> None:
        def clock() -> float:
            return time.monotonic() + ahead_s

        self.bus = open_bus(server, clock=clock)
        self.membership = Membership(self.bus, "secret", clock=clock)
        self.dispatcher = Dispatcher(self.membership, make_policy(policy), clock=clock)
        self.exchange = PeerExchange(self.bus, self.dispatcher.core.peers, name)
        self.name = name
        self.sent = 0

    @property
    def index(self):
        return self.membership.index

    @property
    def follower(self):
        return self.membership.follower

    async def start(self) -> "Router":
        await self.membership.start()
        self.exchange.start()
        return self

    async def stop(self) -> None:
        self.exchange.close()
        await self.membership.close()
        await self.bus.close()

    async def ask(self, tokens: list[int]) -> TokenDelta:
        self.sent += 1
        request = GenerateRequest(
            request_id=RequestId(f"{self.name}{self.sent}"),
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=1),
        )
        deltas = [delta async for delta in self.dispatcher.generate(request)]
        return deltas[0]

    def knows(self, *replicas: CachingReplica) -> bool:
        """Whether its index holds what these replicas hold: as many blocks, and the last one of each chain."""
        return all(self.index.blocks_of(replica.name) == len(replica.stored) for replica in replicas)


class RedisCluster:
    """Starts things and ends them again."""

    def __init__(self, server: RedisServer, exits: AsyncExitStack) -> None:
        self.server = server
        self._exits = exits

    async def replicas(self, *names: str, epoch: int = 1) -> list[CachingReplica]:
        started = [await CachingReplica(self.server, name, epoch).start() for name in names]
        for replica in started:
            self._exits.push_async_callback(replica.die)
        return started

    async def router(
        self, name: str = "router", *, expects: int = 0, policy: str = "warm_prefix", ahead_s: float = 0.0
    ) -> Router:
        router = await Router(self.server, name, policy, ahead_s).start()
        self._exits.push_async_callback(router.stop)
        await until(lambda: len(router.membership.ready()) >= expects)
        return router


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> float:
    """Poll; returns the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < deadline_s, "it never came true"
        await asyncio.sleep(0.01)
    return loop.time() - began
