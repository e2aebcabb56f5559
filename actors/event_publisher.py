"""Keeps the event bus in step with one replica: its KV events in order, snapshots on demand, the lease."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from ..cluster.messages import RankInfo, ReplicaInfo
from ..kv_store.bus import EventBus
from ..kv_store.events import CacheCleared, KvEvent, KvEventBatch, encode

LEASE_S = 5.0
HEARTBEAT_S = 1.0
GATHER_S = 0.02
"""Events gather for this long, so that a burst costs one call to the bus."""

logger = logging.getLogger(__name__)


class EventPublisher:
    """Publishes what ``add`` is given. ``snapshot`` gives all that is cached, after every event before it was added.

    While the bus cannot be reached events are dropped, and a snapshot makes up for them afterwards.
    """

    def __init__(
        self,
        bus: EventBus,
        info: ReplicaInfo,
        snapshot: Callable[[], Awaitable[list[KvEvent]]],
        ranks: Callable[[], tuple[RankInfo, ...]] = tuple,
    ) -> None:
        """``ranks`` tells what has changed in the gang since ``info``."""
        self._bus = bus
        self._info = info
        self._ranks = ranks
        self._snapshot = snapshot
        self._pending: list[KvEvent] = []
        self._sequence = itertools.count()
        self._wants_snapshot = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, events: list[KvEvent]) -> None:
        """Queue events; call it on the publisher's loop."""
        self._pending += events
        self._wake.set()

    async def start(self) -> None:
        """Take the lease, then keep publishing in the background."""
        self._wants_snapshot = await self._bus.heartbeat(self._info, LEASE_S)
        self._wake.set()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._publish_forever()), loop.create_task(self._heartbeat_forever())]

    async def close(self) -> None:
        """Stop publishing and give the lease back, so that routers drop the replica at once."""
        for task in self._tasks:
            task.cancel()
        with suppress(ConnectionError):
            await self._bus.leave(self._info.replica, self._info.epoch)

    async def _heartbeat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._info = replace(self._info, ranks=self._ranks())
            try:
                if await self._bus.heartbeat(self._info, LEASE_S):
                    self._want_snapshot()
            except ConnectionError as error:
                logger.warning("heartbeat: %s", error)
                self._want_snapshot()

    async def _publish_forever(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            try:
                await self._publish()
            except ConnectionError as error:
                logger.warning("events wait for the bus: %s", error)
                self._want_snapshot()
                await asyncio.sleep(HEARTBEAT_S)

    async def _publish(self) -> None:
        replica, epoch = self._info.replica, self._info.epoch
        if self._wants_snapshot:
            self._wants_snapshot = False
            events = await self._snapshot()
            # What is pending by now happened before the snapshot was taken: it is part of it.
            self._pending.clear()
            await self._bus.publish_snapshot(replica, epoch, self._encode([CacheCleared(), *events]))
        elif self._pending:
            events, self._pending = self._pending, []
            if await self._bus.publish(replica, epoch, [self._encode(events)]):
                self._want_snapshot()

    def _encode(self, events: list[KvEvent]) -> bytes:
        return encode(KvEventBatch(self._info.replica, self._info.epoch, next(self._sequence), tuple(events)))

    def _want_snapshot(self) -> None:
        self._wants_snapshot = True
        self._wake.set()
