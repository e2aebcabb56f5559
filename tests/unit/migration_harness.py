"""A cluster in one process: engines behind real channels, which can be lost in every way, and one router."""

import asyncio
import time
from dataclasses import replace

from engine_harness import NAMESPACE, ScriptedExecutor
from polling import until

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.cluster.errors import WarmrootError
from warmroot.cluster.ids import Epoch, ReplicaId, RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest, ReplicaInfo
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.bus import InMemoryBus
from warmroot.router.channel_server import ChannelServer
from warmroot.router.dispatch import Dispatcher
from warmroot.router.membership import Membership
from warmroot.router.policy import make_policy

VOCAB = 50
BLOCK = 4


def scripted_engine(**options) -> Engine:
    executor = ScriptedExecutor(KvLayout.of((None,), BLOCK), num_blocks=400, vocab_size=VOCAB)
    defaults = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return Engine(executor, EngineConfig(**defaults | options), time.monotonic, NAMESPACE)


class EngineReplica:
    """An engine that steps on the event loop, and its channel.

    ``on_step`` is called with the tokens that each request has been sent so far.
    """

    def __init__(self, name, bus, engine, on_step=lambda replica: None, max_model_len=1024):
        self.bus, self.engine, self.on_step = bus, engine, on_step
        self.server = ChannelServer(self, "secret")
        self.sent: dict[str, int] = {}
        self.taken: list[GenerateRequest] = []
        self.most_suspects = 0
        """At a time."""
        self.step_s = 0.0
        self.loop = None
        self.info = ReplicaInfo(
            replica=ReplicaId(name),
            epoch=Epoch(time.monotonic_ns()),
            model="m",
            address="",
            kv_namespace=NAMESPACE,
            block_size=BLOCK,
            kv_total_blocks=400,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
        )

    async def start(self):
        self.info = replace(self.info, address=await self.server.start("127.0.0.1"))
        await self.bus.heartbeat(self.info, 600.0)
        self.loop = asyncio.ensure_future(self.steps())

    async def steps(self):
        while True:
            self.most_suspects = max(self.most_suspects, len(self.server.suspects))
            if self.engine.has_work:
                self.push(self.engine.step())
                self.on_step(self)
            await asyncio.sleep(self.step_s)

    def push(self, deltas):
        for delta in deltas:
            self.sent[delta.request_id] = self.sent.get(delta.request_id, 0) + len(delta.token_ids)
        self.server.push(deltas)

    @property
    def alive(self):
        return not self.loop.done() and not self.loop.cancelled()

    def stop_computing(self):
        self.loop.cancel()

    async def leave(self):
        await self.bus.leave(self.info.replica, self.info.epoch)

    def kill(self):
        """As its process would end: without a word."""
        self.stop_computing()
        self.server._server.close()
        self.server._watch.cancel()
        for connection in list(self.server._connections):
            connection.cut()

    def fail(self):
        """As when a rank is lost."""
        self.stop_computing()
        self.push(self.engine.fail("a rank is lost"))

    def hand_back(self):
        self.server.drain()
        self.server.hand_back(list(self.server.owners))

    def load(self):
        return self.engine.load()

    def submit(self, request):
        self.engine.add(request)
        self.taken.append(request)

    def abort(self, request_id):
        self.engine.abort(request_id)

    @property
    def is_clean(self):
        return not self.server.owners and not self.engine.has_work and not self.engine.load().kv_used_blocks


class MigratingCluster:
    """``async with`` starts ``names`` and ends what is left."""

    def __init__(self, *names, policy="warm_prefix", make_engine=scripted_engine, **options):
        self.bus = InMemoryBus(time.monotonic, "bus")
        self.membership = Membership(self.bus, "secret")
        self.dispatcher = Dispatcher(self.membership, make_policy(policy), **options)
        self.make_engine = make_engine
        self.replicas: dict[str, EngineReplica] = {}
        self.started: list[EngineReplica] = []
        self.names = names

    async def __aenter__(self):
        await self.membership.start()
        for name in self.names:
            await self.start(name)
        await until(lambda: len(self.membership.ready()) == len(self.names))
        return self

    async def __aexit__(self, *error):
        await self.membership.close()
        for replica in self.started:
            replica.stop_computing()
            await replica.server.close()

    async def start(self, name, engine=None, **options):
        replica = EngineReplica(name, self.bus, engine or self.make_engine(), **options)
        self.started.append(replica)
        self.replicas[name] = replica
        await replica.start()
        return replica

    async def ready(self, *names):
        await until(lambda: {member.info.replica for member in self.membership.ready()} == set(names))

    async def run(self, source):
        return [delta async for delta in self.dispatcher.generate(source)]

    async def check_clean(self):
        """Nothing is left of any request, wherever it was."""
        await until(lambda: all(replica.is_clean for replica in self.replicas.values() if replica.alive))
        in_flight = self.dispatcher.core.in_flight
        assert all(in_flight.unfinished(name) == 0 for name in self.replicas)


def request(name="r", prompt=(1, 2, 3, 4, 5, 6), **params):
    params = {"max_tokens": 12, "ignore_eos": True} | params
    return GenerateRequest(request_id=RequestId(name), prompt_token_ids=list(prompt), params=SamplingParams(**params))


def check_whole(deltas, name="r"):
    """One uninterrupted stream; its tokens."""
    tokens = []
    for delta in deltas:
        assert (delta.request_id, delta.index) == (name, len(tokens))
        tokens += delta.token_ids
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    assert [delta.cached_tokens is None for delta in deltas] == [False] + [True] * (len(deltas) - 1)
    return tokens


async def ends_with(task) -> WarmrootError:
    try:
        await task
    except WarmrootError as error:
        return error
    raise AssertionError("it did not fail")
