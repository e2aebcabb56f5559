"""Ray Serve's request router with Warmroot's policies, for plain deployment handles.

Written against ray 2.60. An exception from ``choose_replicas``, or an empty answer, would hang the request for ever, so
whatever goes wrong here falls back to all candidates.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import Load, ReplicaInfo
from ..cluster.metadata_store import EMBEDDED
from ..kv_store.bus import BusEntry, BusReader, Cursor
from ..kv_store.hashing import TOKEN_BYTES, pack_tokens
from ..kv_store.hot_prefixes import HotPrefix
from ..kv_store.index import PrefixIndex
from ..kv_store.redis_bus import RedisEventBus
from .bus_follower import BusFollower
from .core import RoutingCore, Ticket
from .peer_exchange import PeerExchange
from .policy import RoutingRequest, make_policy
from .policy.rates import Kind, Kinds, ReplicaRates

BUS_ACTOR = "warmroot-bus"
BUS_NAMESPACE = "warmroot"
FIND_BUS_EVERY_S = 1.0

logger = logging.getLogger(__name__)

FindBus = Callable[[], Awaitable[BusReader | None]]
"""Finds the bus, or tells that there is none yet."""


@dataclass(slots=True)
class ServedReplica:
    """A replica as Serve and the bus describe it together."""

    info: ReplicaInfo
    rates: ReplicaRates
    load: Load


class WarmrootRequestRouter(RequestRouter):
    """Routes calls whose first argument has ``prompt_token_ids`` (a key or an attribute) by prefix, others by load.

    Set it as ``request_router_class`` with ``request_router_kwargs={"policy": name}``.
    """

    def initialize_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, policy: str = "warm_prefix", find_bus: FindBus | None = None
    ) -> None:
        """Called by Serve once, with ``request_router_kwargs``; those are JSON: ``find_bus`` is for others."""
        self._index = PrefixIndex()
        self._core = RoutingCore(self._index, make_policy(policy), time.monotonic)
        self._known: dict[ReplicaId, ServedReplica] = {}
        self._kinds = Kinds()
        self._strangers: dict[ReplicaId, ServedReplica] = {}
        self._find_bus = find_bus or find_bus_actor
        self._follower: asyncio.Task[None] | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Every candidate once, each a rank of its own, best first."""
        try:
            if pending_request is not None:
                # Without this Serve retries in a tight loop while every replica is full.
                pending_request.routing_context.should_backoff = True
            self._follow()
            ranked = self._rank(candidate_replicas, pending_request)
            if ranked:
                return ranked
        except Exception:
            logger.exception("routing failed; any replica will do")
        return [list(candidate_replicas)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica accepted: its prompt counts as cached there until ``result`` is complete, well or not.

        Serve's ``on_request_completed`` would not do: it also tells, by the same id, of attempts that were rejected,
        and it may come before this does.
        """
        try:
            ticket = self._reserve(request_of(pending_request), ReplicaId(replica_id.unique_id))
        except Exception:
            logger.exception("a reservation failed")
            return
        if ticket is None:
            return
        loop = asyncio.get_running_loop()
        try:
            result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._core.finish, ticket))
        except Exception:
            logger.exception("nobody would tell when the request ends: it is not counted")
            self._core.finish(ticket)

    def _rank(
        self, candidates: Sequence[RunningReplica], pending_request: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        by_id = {ReplicaId(replica.replica_id.unique_id): replica for replica in candidates}
        self._core.sync([self._served(name, replica) for name, replica in by_id.items()])
        _, ranking = self._core.choose(request_of(pending_request))
        return [[by_id[choice.replica]] for choice in ranking]

    def _served(self, name: ReplicaId, replica: RunningReplica) -> ServedReplica:
        known = self._known.get(name) or self._strangers.setdefault(name, _stranger(name))
        running = self.replica_queue_len_cache.get(replica.replica_id) or 0
        known.load = Load(
            running=running,
            kv_total_blocks=known.info.kv_total_blocks,
            max_num_seqs=known.info.max_num_seqs,
        )
        return known

    def _reserve(self, request: RoutingRequest, name: ReplicaId) -> Ticket | None:
        known = self._known.get(name)
        if known is None or not request.tokens:
            return None
        self._core.join(known)
        backlog_s = self._core.in_flight.backlog_s(name)
        ticket = self._core.assign(request, name)
        if ticket.reservation is not None:
            # Serve does not tell when the first token came: believe the estimate.
            delay = backlog_s + ticket.reservation.prefill_s
            asyncio.get_running_loop().call_later(delay, self._core.in_flight.first_token, ticket.reservation)
        return ticket

    def _follow(self) -> None:
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow_bus())

    async def _follow_bus(self) -> None:
        while (bus := await self._find_bus()) is None:
            await asyncio.sleep(FIND_BUS_EVERY_S)
        exchange = PeerExchange(bus, self._core.peers, uuid.uuid4().hex)
        exchange.start()
        try:
            await BusFollower(bus, self._index, self._meet).run()
        finally:
            exchange.close()

    def _meet(self, infos: list[ReplicaInfo]) -> None:
        for gone in self._known.keys() - {info.replica for info in infos}:
            del self._known[gone]
            self._index.drop(gone)
        kinds = self._kinds.of(infos)
        for info in infos:
            known = self._known.get(info.replica)
            if known is None or (known.info.epoch, known.info.kv_namespace) != (info.epoch, info.kv_namespace):
                self._index.drop(info.replica, before=info.epoch)
                self._known[info.replica] = ServedReplica(info, ReplicaRates(kinds[info.replica]), Load())


def request_of(pending_request: PendingRequest | None) -> RoutingRequest:
    """What decides where a call goes; without a prompt when it has none or it is not what it should be."""
    if pending_request is None:
        return RoutingRequest(RequestId(""), 0)
    metadata = pending_request.metadata
    request_id, session = RequestId(metadata.internal_request_id), str(getattr(metadata, "session_id", ""))
    for argument in [*pending_request.args, *pending_request.kwargs.values()]:
        token_ids = _field(argument, "prompt_token_ids")
        if token_ids is not None:
            try:
                tokens, salt = pack_tokens(token_ids), str(_field(argument, "cache_salt") or "")
            except (TypeError, OverflowError):
                break  # the replica will refuse it; any replica can
            return RoutingRequest(request_id, len(tokens) // TOKEN_BYTES, session, tokens, salt)
    return RoutingRequest(request_id, 0, session)


def _field(argument: Any, name: str) -> Any:
    if isinstance(argument, dict):
        return cast("dict[str, Any]", argument).get(name)
    return getattr(argument, name, None)


def _stranger(name: ReplicaId) -> ServedReplica:
    """A replica that has not been heard of on the bus: average in every way."""
    info = ReplicaInfo(
        replica=name,
        epoch=cast(Any, 0),
        model="",
        address="",
        kv_namespace=b"",
        block_size=1,
        kv_total_blocks=2**20,
        max_num_seqs=256,
        max_num_batched_tokens=1,
        max_model_len=1,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
    )
    return ServedReplica(info, ReplicaRates(Kind(0.0, 0.0)), Load())


class BusActorReader:
    """``BusReader`` over the cluster's bus actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    @property
    def store(self) -> str:
        """See ``BusReader``."""
        return EMBEDDED

    async def read(self, cursor: Cursor, timeout_s: float) -> tuple[list[BusEntry], Cursor]:
        """See ``BusReader``."""
        return await self._call("read", cursor, timeout_s)

    async def members(self) -> list[ReplicaInfo]:
        """See ``BusReader``."""
        return await self._call("members")

    async def request_snapshot(self, replica: str) -> None:
        """See ``BusReader``."""
        await self._call("request_snapshot", replica)

    async def share(self, word: bytes) -> None:
        """See ``BusReader``."""
        await self._call("share", word)

    async def hear(self, heard: int, timeout_s: float) -> tuple[list[bytes], int]:
        """See ``BusReader``."""
        return await self._call("hear", heard, timeout_s)

    async def put_hot(self, source: str, prefixes: list[HotPrefix], ttl_s: float) -> None:
        """See ``BusReader``."""
        await self._call("put_hot", source, prefixes, ttl_s)

    async def hot(self, limit: int) -> list[HotPrefix]:
        """See ``BusReader``."""
        return await self._call("hot", limit)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if not ray.is_initialized():
            # Ray would start a cluster for this very call.
            raise ConnectionError("the event bus is out of reach: this process has left its Ray cluster")
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except RayError as error:
            raise ConnectionError(f"the event bus does not answer: {error}") from error


async def find_bus_actor() -> BusReader | None:
    """The bus of this Ray cluster, if it has one: the actor, or the Redis that it names."""
    try:
        # It asks the GCS and waits: not on the event loop that routes.
        actor = await asyncio.to_thread(ray.get_actor, BUS_ACTOR, BUS_NAMESPACE)
        store = await actor.address.remote()
    except (ValueError, RayError):
        return None
    return BusActorReader(actor) if store is None else RedisEventBus(store)
