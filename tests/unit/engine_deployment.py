"""An ingress over engines with real caches, all in one process: HTTP, dispatcher, index and engines."""

import httpx
from engine_harness import NAMESPACE, Harness
from openai_harness import byte_tokenizer

from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.cluster.messages import ReplicaInfo
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import KvEventBatch, encode
from warmroot.router.dispatch import Dispatcher
from warmroot.router.frontend import Frontend
from warmroot.router.membership import Membership
from warmroot.router.openai.app import build_app
from warmroot.router.openai.settings import ApiSettings
from warmroot.router.policy import make_policy

BLOCK = 4
PROMPT = "the very same words"
CACHED = len(PROMPT) - 1
ADMIN = "sk-admin"
KEYS = ({"key": "sk-a", "tenant": "a"}, {"key": "sk-a2", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}, {"key": "sk"})


class EngineReplica:
    """A ``ReplicaClient`` right on an engine."""

    connected, draining = True, False

    def __init__(self, name, bus):
        self.name, self.bus, self.seq = name, bus, 0
        self.harness = Harness(vocab_size=257, block_size=BLOCK)
        self.info = ReplicaInfo(
            replica=ReplicaId(name),
            epoch=Epoch(1),
            model="m",
            address=name,
            kv_namespace=NAMESPACE,
            block_size=BLOCK,
            kv_total_blocks=64,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=256,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
        )

    @property
    def load(self):
        return self.harness.engine.load()

    @property
    def counts(self):
        return self.harness.engine.counts()

    def start(self):
        pass

    async def close(self):
        pass

    async def submit(self, request):
        self.harness.engine.add(request)
        self.harness.run()
        return Deltas(self.harness.deltas[request.request_id])

    async def publish(self):
        batch = KvEventBatch(self.info.replica, Epoch(1), self.seq, tuple(self.harness.engine.drain_events()))
        self.seq += 1
        await self.bus.publish(self.name, 1, [encode(batch)])


class Deltas:
    def __init__(self, deltas):
        self.deltas = iter(deltas)

    def __aiter__(self):
        return self

    async def __anext__(self):
        for delta in self.deltas:
            return delta
        raise StopAsyncIteration

    def close(self):
        pass


class Deployment:
    def __init__(self, queue=None, **settings):
        self.now = 0.0
        self.bus = InMemoryBus(lambda: self.now, "bus")
        self.replicas = {name: EngineReplica(name, self.bus) for name in ("r0", "r1")}
        self.membership = Membership(
            self.bus, "", connect=lambda info, on_change: self.replicas[info.replica], clock=lambda: self.now
        )
        self.dispatcher = Dispatcher(self.membership, make_policy(), queue=queue, clock=lambda: self.now)
        frontend = Frontend(self.dispatcher, byte_tokenizer(), model="m", max_model_len=256)
        keys = {"api_keys": KEYS, "admin_keys": (ADMIN,)}
        self.updaters = {}
        self.app = build_app(
            {"m": frontend}, ApiSettings.model_validate(keys | settings), self.dispatcher, updaters=self.updaters
        )

    async def follow(self):
        """Events have arrived, and what was in flight is forgotten."""
        self.now += 5.0
        for replica in self.replicas.values():
            await replica.publish()
            await self.bus.heartbeat(replica.info, 60.0)
        await self.membership.follower.follow_once(0.0)
        await self.membership.follower.follow_once(0.0)

    async def join(self, name):
        """A replica more; who knows it may warm it up before ``follow`` announces it."""
        self.replicas[name] = EngineReplica(name, self.bus)
        return self.replicas[name]

    async def drain(self, name):
        """It gives its lease back, and stays connected."""
        await self.bus.leave(name, 1)
        del self.replicas[name]
        await self.follow()

    async def ask(self, key, **fields):
        """(replica, cached tokens)."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": PROMPT, "max_tokens": 2, **fields}
            answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        await self.follow()
        return answer.headers["x-warmroot-replica"], int(answer.headers["x-warmroot-cached-tokens"])
