"""The event bus of a cluster without Redis: one named Ray actor, with a notice board for starting replicas."""

import time
import uuid

import ray

from ..cluster.messages import ModelCard, ReplicaInfo, StartupNote
from ..kv_store.bus import InMemoryBus
from ..router.serve_router import BUS_ACTOR, BUS_NAMESPACE, BusActorReader


class BusActor(InMemoryBus):
    """Runs in the actor: the bus, what clients need to know of the model, and how far replicas have started."""

    def __init__(self) -> None:
        super().__init__(time.monotonic, uuid.uuid4().hex)
        self._cards: dict[str, ModelCard] = {}
        self._notes: dict[str, StartupNote] = {}

    async def put_card(self, card: ModelCard) -> None:
        """Store what a client needs to use a model."""
        self._cards[card.model] = card

    async def card(self, name: str | None) -> ModelCard | None:
        """The card of a served name, or of the only model when no name is given."""
        found = [card for card in self._cards.values() if name is None or name in card.names]
        return found[0] if len(found) == 1 else None

    async def report(self, replica: str, note: StartupNote) -> None:
        """A replica tells how far its start is."""
        self._notes[replica] = note

    async def notes(self) -> dict[str, StartupNote]:
        """Latest note of each replica."""
        return self._notes


class RayBus(BusActorReader):
    """``EventBus`` of this process, over the actor. Raises ConnectionError while the actor cannot be reached."""

    async def publish(self, replica: str, epoch: int, batches: list[bytes]) -> bool:
        """See ``EventBus``."""
        return await self._call("publish", replica, epoch, batches)

    async def publish_snapshot(self, replica: str, epoch: int, snapshot: bytes) -> None:
        """See ``EventBus``."""
        await self._call("publish_snapshot", replica, epoch, snapshot)

    async def heartbeat(self, info: ReplicaInfo, ttl_s: float) -> bool:
        """See ``EventBus``."""
        return await self._call("heartbeat", info, ttl_s)

    async def leave(self, replica: str, epoch: int) -> None:
        """See ``EventBus``."""
        await self._call("leave", replica, epoch)

    async def put_card(self, card: ModelCard) -> None:
        """See ``BusActor``."""
        await self._call("put_card", card)

    async def card(self, name: str | None) -> ModelCard | None:
        """See ``BusActor``."""
        return await self._call("card", name)

    async def report(self, replica: str, note: StartupNote) -> None:
        """See ``BusActor``."""
        await self._call("report", replica, note)


def open_bus() -> RayBus:
    """The cluster's bus; started if there is none yet. It outlives the process that started it."""
    options = {"name": BUS_ACTOR, "namespace": BUS_NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    actor = ray.remote(BusActor).options(num_cpus=0, max_concurrency=1000, max_restarts=-1, **options).remote()
    return RayBus(actor)


def find_bus() -> RayBus | None:
    """The cluster's bus, or None where Warmroot is not running."""
    try:
        return RayBus(ray.get_actor(BUS_ACTOR, namespace=BUS_NAMESPACE))
    except ValueError:
        return None
