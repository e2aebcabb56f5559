"""Ray Serve's request router with Warmroot's policies, for plain deployment handles.

Written against ray 2.60. An exception from ``choose_replicas``, or an empty answer, would hang the request for ever, so
whatever goes wrong here falls back to all candidates.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import Load, ReplicaInfo
from ..kv_store.bus import BusEntry, BusReader, Cursor
from ..kv_store.hashing import TOKEN_BYTES, pack_tokens
from ..kv_store.index import PrefixIndex
from .bus_follower import BusFollower
from .policy import RoutingRequest, make_policy
from .policy.in_flight import InFlight, Reservation
from .policy.rates import ReplicaRates
from .routing_view import RoutingView, prefix_of

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call carries that routing can use."""

    tokens: bytes
    salt: str

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.tokens) // TOKEN_BYTES


class WarmrootRequestRouter(RequestRouter):
    """Routes calls whose first argument has ``prompt_token_ids`` (a key or an attribute) by prefix, others by load.

    Set it as ``request_router_class`` with ``request_router_kwargs={"policy": name}``.
    """

    def initialize_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, policy: str = "warm_prefix", find_bus: FindBus | None = None
    ) -> None:
        """Called by Serve once, with ``request_router_kwargs``; those are JSON: ``find_bus`` is for others."""
        self._policy = make_policy(policy)
        self._index = PrefixIndex()
        self._in_flight = InFlight(time.monotonic)
        self._view = RoutingView(self._index, self._in_flight)
        self._known: dict[ReplicaId, ServedReplica] = {}
        self._reserved: dict[str, Reservation] = {}
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
        """A replica accepted: its prompt counts as cached there from now on."""
        try:
            self._reserve(pending_request, ReplicaId(replica_id.unique_id))
        except Exception:
            logger.exception("a reservation failed")

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It ended, well or not."""
        reservation = self._reserved.pop(internal_request_id, None)
        if reservation is not None:
            self._in_flight.release(reservation)

    def _rank(
        self, candidates: Sequence[RunningReplica], pending_request: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        prompt = prompt_of(pending_request)
        by_id = {ReplicaId(replica.replica_id.unique_id): replica for replica in candidates}
        served = [self._served(name, replica) for name, replica in by_id.items()]
        view = self._view.candidates(prompt.tokens, prompt.salt, served)
        request_id = pending_request.metadata.internal_request_id if pending_request is not None else ""
        ranked = self._policy.choose(RoutingRequest(RequestId(request_id), prompt.num_tokens), view)
        return [[by_id[choice.replica]] for choice in ranked]

    def _served(self, name: ReplicaId, replica: RunningReplica) -> ServedReplica:
        known = self._known.get(name) or _stranger(name)
        running = self.replica_queue_len_cache.get(replica.replica_id) or 0
        known.load = Load(
            running=running,
            kv_total_blocks=known.info.kv_total_blocks,
            max_num_seqs=known.info.max_num_seqs,
        )
        return known

    def _reserve(self, pending_request: PendingRequest, name: ReplicaId) -> None:
        known, prompt = self._known.get(name), prompt_of(pending_request)
        if known is None or not prompt.tokens:
            return
        candidate = self._view.candidates(prompt.tokens, prompt.salt, [known])[0]
        uncached = max(1, prompt.num_tokens - candidate.cached_tokens)
        seconds = uncached / candidate.prefill_tokens_per_s
        prefix = prefix_of(known.info, prompt.tokens, prompt.salt)
        reservation = self._in_flight.reserve(name, prefix, uncached, seconds)
        self._reserved[pending_request.metadata.internal_request_id] = reservation
        # Serve does not tell when the first token came: believe the estimate.
        delay = candidate.backlog_s + seconds
        asyncio.get_running_loop().call_later(delay, self._in_flight.first_token, reservation)

    def _follow(self) -> None:
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow_bus())

    async def _follow_bus(self) -> None:
        while (bus := await self._find_bus()) is None:
            await asyncio.sleep(FIND_BUS_EVERY_S)
        await BusFollower(bus, self._index, self._meet).run()

    def _meet(self, infos: list[ReplicaInfo]) -> None:
        for gone in self._known.keys() - {info.replica for info in infos}:
            del self._known[gone]
            self._index.drop(gone)
        for info in infos:
            known = self._known.get(info.replica)
            if known is None or known.info.epoch != info.epoch:
                rates = ReplicaRates(info.prefill_tokens_per_s, info.decode_step_s)
                self._known[info.replica] = ServedReplica(info, rates, Load())


def prompt_of(pending_request: PendingRequest | None) -> Prompt:
    """Prompt and salt of a call; empty when it has none or they are not what they should be."""
    arguments = [*pending_request.args, *pending_request.kwargs.values()] if pending_request is not None else []
    for argument in arguments:
        token_ids = _field(argument, "prompt_token_ids")
        if token_ids is not None:
            try:
                return Prompt(pack_tokens(token_ids), str(_field(argument, "cache_salt") or ""))
            except (TypeError, OverflowError):
                break  # the replica will refuse it; any replica can
    return Prompt(b"", "")


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
    return ServedReplica(info, ReplicaRates(0.0, 0.0), Load())


class BusActorReader:
    """``BusReader`` over the cluster's bus actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def read(self, cursor: Cursor, timeout_s: float) -> tuple[list[BusEntry], Cursor]:
        """See ``BusReader``."""
        return await self._call("read", cursor, timeout_s)

    async def members(self) -> list[ReplicaInfo]:
        """See ``BusReader``."""
        return await self._call("members")

    async def request_snapshot(self, replica: str) -> None:
        """See ``BusReader``."""
        await self._call("request_snapshot", replica)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if not ray.is_initialized():
            # Ray would start a cluster for this very call.
            raise ConnectionError("the event bus is out of reach: this process has left its Ray cluster")
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except RayError as error:
            raise ConnectionError(f"the event bus does not answer: {error}") from error


async def find_bus_actor() -> BusActorReader | None:
    """The bus of this Ray cluster, if it has one."""
    try:
        # It asks the GCS and waits: not on the event loop that routes.
        return BusActorReader(await asyncio.to_thread(ray.get_actor, BUS_ACTOR, BUS_NAMESPACE))
    except (ValueError, RayError):
        return None
