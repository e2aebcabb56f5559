"""A replica: engine, model and channel in one Serve actor, announced on the event bus."""

import asyncio
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from ..cluster.config import WarmrootConfig
from ..cluster.engine_counts import EngineCounts
from ..cluster.errors import EngineError, WarmrootError
from ..cluster.ids import BlockHash, Epoch, ReplicaId, RequestId
from ..cluster.messages import GenerateRequest, Load, ReplicaInfo, StartupNote, TokenDelta
from ..cluster.sampling_params import SamplingParams
from ..cluster.weights_update import NewWeights
from ..kv_store.events import KvEvent
from ..router.channel_server import ChannelServer
from ..router.channel_tls import ChannelTls
from ..router.engine_spans import EngineSpans
from ..router.logs import set_up_logging
from ..router.tracing import tracing
from ..router.warm_up import warm_up
from .draining import drain
from .embedded_bus import open_bus
from .event_publisher import EventPublisher
from .kernels.library import native
from .placement import rank_resources
from .serve_port import listen_at_node_address

if TYPE_CHECKING:
    from .engine_host import EngineHost
    from .parallel.gang import Crew
    from .parallel.gang_config import GangConfig
    from .weights_change import WeightsChange


WARM_UP_S = 30.0
"""How long a replica may compute hot prefixes before it is announced."""
FAREWELL_S = 1.0
"""How long a replica that has failed may take to say so."""

logger = logging.getLogger(__name__)


class Replica:
    """Serve deployment of one model. Requests come over the channel; ``generate`` serves plain Serve handles."""

    async def __init__(
        self, config: WarmrootConfig, token: str, channel_host: str | None = None, build: str = ""
    ) -> None:
        """Load, warm up, listen, announce.

        ``token`` is the secret that opens the channel; ``channel_host`` where it listens, by default at the address
        by which other nodes know this one. ``build``: of the application.
        """
        listen_at_node_address()
        set_up_logging(config.observability)
        self._id = ReplicaId(serve.get_replica_context().replica_id.unique_id)
        self._bus = open_bus(config)
        self._loop = asyncio.get_running_loop()
        self._plain: dict[RequestId, asyncio.Queue[TokenDelta]] = {}
        self._exits = AsyncExitStack()
        self._spans = self._traced(config)
        self._exits.push_async_callback(self._bus.close)
        try:
            self._host = await asyncio.to_thread(self._load, config)
        except WarmrootError as error:
            await self._note(StartupNote(stage="failed", failed=error.message))
            raise
        self._channel = ChannelServer(self, token, self._counts)
        self._exits.push_async_callback(self._channel.close)
        tls = ChannelTls.of(config.tls.channel)
        address = await self._channel.start(channel_host or ray.util.get_node_ip_address(), tls=tls)
        self.info: ReplicaInfo = self._host.describe(
            self._id, Epoch(time.time_ns()), address, node=ray.get_runtime_context().get_node_id(), pid=os.getpid()
        )
        self._publisher = EventPublisher(self._bus, self.info, self._snapshot, self._host.model.ranks)
        self._engine = self._host.start(self._on_deltas, self._on_events, self._on_failure)
        self._exits.callback(self._engine.close)
        self._weights = self._weights_change()
        self._exits.push_async_callback(self._let_go, config.limits.shutdown_grace)
        self._card = replace(self._host.card(token), build=build)
        await self._take_up_weights()
        with suppress(ConnectionError):  # the first snapshot brings it again
            await self._bus.put_card(self._card)
        await self._warm_up()
        await self._publisher.start()
        self._exits.push_async_callback(self._publisher.close)
        self._channel.answerer = self._weights.answer
        await self._take_up_weights()  # what came while this replica was not known yet
        self._exits.callback(self._channel.drain)
        await self._note(StartupNote(stage="ready"))

    def load(self) -> Load:
        """How busy the engine is."""
        return self._engine.load()

    def _counts(self) -> EngineCounts:
        return self._engine.counts()

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request of an ingress. Raises a WarmrootError when it is refused."""
        self._engine.add(request)
        if self._spans is not None:
            self._spans.began(request)

    def abort(self, request_id: RequestId) -> None:
        """Forget a request and free its blocks."""
        self._engine.abort(request_id)
        if self._spans is not None:
            self._spans.ended(request_id)

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """For plain Serve handles: ``{"prompt_token_ids": [...], "params": {...}}`` in, deltas as dicts out.

        ``params`` holds fields of SamplingParams; ``cache_salt``, ``priority`` and ``request_id`` may stand beside it.
        Every delta crosses Ray, which costs far more than the channel.
        """
        params = SamplingParams(**request.get("params", {}))
        source = GenerateRequest(
            request_id=RequestId(request.get("request_id") or f"serve-{uuid.uuid4().hex}"),
            prompt_token_ids=request["prompt_token_ids"],
            params=params if params.seed is not None else replace(params, seed=secrets.randbits(63)),
            priority=request.get("priority", 0),
            cache_salt=request.get("cache_salt", ""),
        )
        async with aclosing(self._deltas(source)) as deltas:
            async for delta in deltas:
                yield asdict(delta)

    def record_replica_metadata(self) -> dict[str, str]:
        """Asked by Serve once; every router sees it."""
        return {"replica": self.info.replica, "address": self.info.address}

    def check_health(self) -> None:
        """Asked by Serve; raising makes it replace this replica."""
        if not self._engine.healthy:
            raise EngineError("the engine has failed; see the replica's log")

    async def __del__(self) -> None:
        """Called by Serve when it stops the replica.

        Take no more requests, leave the bus, let go of what is open, end the engine, then cut the connections.
        """
        await self._exits.aclose()

    def _traced(self, config: WarmrootConfig) -> EngineSpans | None:
        traces = tracing(config.observability.otlp_traces_endpoint, "warmroot-replica")
        if traces is None:
            return None
        self._exits.callback(traces.close)
        return EngineSpans(traces, self._id)

    async def _let_go(self, grace_s: float) -> None:
        await drain(self._channel, self._engine.remaining, self._has_others, grace_s)

    async def _has_others(self) -> bool:
        """Whether another replica has the model with these weights; without word of any, none."""
        try:
            members = await self._bus.members()
        except ConnectionError:
            return False
        return any(info.replica != self._id and info.computes_as(self.info) for info in members)

    def _load(self, config: WarmrootConfig) -> "EngineHost":
        """On a thread of its own. The import brings torch, which whoever only names this class does not need."""
        threads = config.deploy.threads_per_replica
        if threads is not None:  # OpenMP and MKL read these when they are loaded
            os.environ.update({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)})
        if native() is not None:  # torch then does little between kernels: its threads must not spin on their cores
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        from .engine_host import EngineHost

        return EngineHost.load(config, self._report, _start_crew)

    async def _deltas(self, source: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Of a request that did not come over the channel."""
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._plain[source.request_id] = deltas
        try:
            self._engine.add(source)
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._plain[source.request_id]
            self._engine.abort(source.request_id)

    async def _warm_up(self) -> None:
        """Before it is announced: who comes new or again must not begin with nothing while others have it all."""
        if not await self._has_others():
            return  # somebody may be waiting: routers have it compute what is hot once it has nothing else to do
        await self._note(StartupNote(stage="computing hot prefixes"))
        try:
            num_held = await asyncio.wait_for(warm_up(self._bus, self.info, self._run), WARM_UP_S)
        except (ConnectionError, WarmrootError, asyncio.TimeoutError) as error:
            logger.info("replica %s starts with what it has: %s", self._id, error or "warming up took too long")
        else:
            logger.info("replica %s holds %d hot prefixes", self._id, num_held)

    async def _run(self, request: GenerateRequest) -> None:
        async with aclosing(self._deltas(request)) as deltas:
            async for _ in deltas:
                pass

    def _weights_change(self) -> "WeightsChange":
        from .weights_change import WeightsChange  # brings torch, which is there by now

        return WeightsChange(self._host, self._engine, self._hold_weights)

    async def _take_up_weights(self) -> None:
        """Weights that the other replicas of this build have been given since they started."""
        with suppress(ConnectionError):
            card = await self._bus.card(self.info.model)
            if card is not None and card.build == self._card.build:
                self._card = replace(self._card, weights=card.weights)
                await self._weights.follow(card.weights)

    async def _hold_weights(self, new: NewWeights, namespace: BlockHash, weights_format: str) -> None:
        """Tell what the replica holds now."""
        self.info = replace(
            self.info, kv_namespace=namespace, weights_version=new.version, weights_format=weights_format
        )
        self._card = replace(self._card, weights=asdict(new))
        with suppress(ConnectionError):  # the first snapshot brings it again
            await self._bus.put_card(self._card)
        await self._publisher.announce(self.info)

    async def _snapshot(self) -> list[KvEvent]:
        # A bus that wants a snapshot may have been restarted: it does not know the model either. A card that is there
        # may be that of a newer build.
        if await self._bus.card(self.info.model) is None:
            await self._bus.put_card(self._card)
        return await asyncio.wrap_future(self._engine.snapshot())

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        self._channel.push(deltas)
        if self._spans is not None:
            self._spans.saw(deltas)
        if self._plain:
            for delta in deltas:
                if delta.request_id in self._plain:
                    self._plain[delta.request_id].put_nowait(delta)

    def _on_events(self, events: list[KvEvent]) -> None:
        self._loop.call_soon_threadsafe(self._publisher.add, events)

    def _on_failure(self, message: str) -> None:
        asyncio.run_coroutine_threadsafe(self._end(message), self._loop)

    async def _end(self, message: str) -> None:
        """Nothing can be computed here any more: leave the bus and end the process. Serve starts another replica.

        Health checks would find out too, but only after several of them.
        """
        logger.error("replica %s ends: %s", self._id, message)
        self._channel.drain()
        with suppress(Exception):
            await asyncio.wait_for(self._publisher.close(), FAREWELL_S)
        with suppress(Exception):  # what the streams were told must be out
            await asyncio.wait_for(self._channel.close(), FAREWELL_S)
        os._exit(1)

    def _report(self, stage: str, done: int, total: int) -> None:
        """From the loading thread."""
        asyncio.run_coroutine_threadsafe(self._note(StartupNote(stage=stage, done=done, total=total)), self._loop)

    async def _note(self, note: StartupNote) -> None:
        with suppress(ConnectionError):  # who starts the cluster would like to know, but nothing depends on it
            await self._bus.report(self._id, note)


def _start_crew(config: "GangConfig") -> "Crew":
    """The ranks of a model that is cut: actors in the bundles that Serve reserved for this replica."""
    from .shard_worker import ShardWorkers

    group = ray.util.get_current_placement_group()
    assert group is not None, "the deployment asks for one"
    return ShardWorkers(config, group, rank_resources(group.bundle_specs[0], config.topology))
