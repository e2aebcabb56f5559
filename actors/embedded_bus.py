"""The cluster's bus: in a named Ray actor, or in Redis; the actor then only tells where."""

import os
import time
import uuid
from typing import Any

import ray

from ..cluster.config import WarmrootConfig
from ..cluster.demand import Demand
from ..cluster.messages import ModelCard, ReplicaInfo, StartupNote
from ..cluster.metadata_store import RedisAddress, parse_store, with_password
from ..cluster.scaling import Decision
from ..cluster.scaling_status import ScalingStatus
from ..kv_store.bus import ClusterBus, InMemoryBus
from ..kv_store.redis_bus import RedisEventBus
from ..router.serve_router import BUS_ACTOR, BUS_NAMESPACE, BusActorReader
from .scaling_desk import ScalingDesk


class BusActor(InMemoryBus):
    """Runs in the actor: the bus of a cluster without Redis, or the address of the Redis; the desk in any case."""

    def __init__(self, store: RedisAddress | None = None) -> None:
        super().__init__(time.monotonic, uuid.uuid4().hex)
        self._address = store
        self._desk = ScalingDesk()

    async def put_address(self, store: RedisAddress | None) -> None:
        """Where the bus is now; None: here."""
        self._address = store

    async def address(self) -> RedisAddress | None:
        """Where the bus is; None: here."""
        return self._address

    async def tell_demand(self, model: str, demand: Demand) -> ScalingStatus | None:
        """See ``ScalingDesk``."""
        return self._desk.tell(model, demand)

    async def ask_demand(self, model: str, decided: Decision | None) -> list[Demand]:
        """See ``ScalingDesk``."""
        return self._desk.ask(model, decided)


class RayBus(BusActorReader):
    """``ClusterBus`` of this process, over the actor. Raises ConnectionError while the actor cannot be reached."""

    async def publish(self, replica: str, epoch: int, batches: list[bytes]) -> bool:
        """See ``EventBus``."""
        return await self._call("publish", replica, epoch, batches)

    async def publish_snapshot(self, replica: str, epoch: int, *parts: bytes) -> None:
        """See ``EventBus``."""
        await self._call("publish_snapshot", replica, epoch, *parts)

    async def heartbeat(self, info: ReplicaInfo, ttl_s: float) -> bool:
        """See ``EventBus``."""
        return await self._call("heartbeat", info, ttl_s)

    async def leave(self, replica: str, epoch: int) -> None:
        """See ``EventBus``."""
        await self._call("leave", replica, epoch)

    async def check(self) -> None:
        """See ``ClusterBus``."""
        await self._call("check")

    async def put_card(self, card: ModelCard) -> None:
        """See ``ClusterBus``."""
        await self._call("put_card", card)

    async def card(self, name: str | None) -> ModelCard | None:
        """See ``ClusterBus``."""
        return await self._call("card", name)

    async def report(self, replica: str, note: StartupNote) -> None:
        """See ``ClusterBus``."""
        await self._call("report", replica, note)

    async def notes(self) -> dict[str, StartupNote]:
        """See ``ClusterBus``."""
        return await self._call("notes")

    async def clear(self) -> None:
        """See ``ClusterBus``."""
        await self._call("clear")

    async def close(self) -> None:
        """See ``ClusterBus``."""


def store_of(config: WarmrootConfig) -> RedisAddress | None:
    """Where the configuration wants the bus, with the environment's password; None: in the actor."""
    store = config.deploy.metadata_store
    address = None if store is None else parse_store(store.get_secret_value())
    return None if address is None else with_password(address, os.environ)


def open_bus(config: WarmrootConfig) -> ClusterBus:
    """The cluster's bus. The actor is started if there is none yet; it outlives the process that started it."""
    store = store_of(config)
    options = {"name": BUS_ACTOR, "namespace": BUS_NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    remote: Any = ray.remote(BusActor)
    actor = remote.options(num_cpus=0, max_concurrency=1000, max_restarts=-1, **options).remote(store)
    if store is None:
        return RayBus(actor)
    actor.put_address.remote(store)  # an actor that was there may know of another
    return RedisEventBus(store)


def find_bus() -> ClusterBus | None:
    """The cluster's bus, or None where Warmroot is not running."""
    try:
        actor = ray.get_actor(BUS_ACTOR, namespace=BUS_NAMESPACE)
    except ValueError:
        return None
    store: Any = ray.get(actor.address.remote())
    return RayBus(actor) if store is None else RedisEventBus(store)


def end_bus() -> None:
    """Take the actor down; what is in Redis fades by itself, or is cleared by the next start."""
    try:
        ray.kill(ray.get_actor(BUS_ACTOR, namespace=BUS_NAMESPACE))
    except ValueError:
        return
