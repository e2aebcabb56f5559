"""Keeps the event bus in step with one replica: its KV events in order, snapshots on demand, the lease."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from ..cluster.messages import RankInfo, ReplicaInfo
from ..kv_store.bus import EventBus
from ..kv_store.events import KvEvent, KvEventBatch, SnapshotPart, encode
from ..kv_store.snapshot_parts import snapshot_parts

LEASE_S = 5.0
HEARTBEAT_S = 1.0
GATHER_S = 0.02
"""Events gather for this long, so that a burst costs one call to the bus."""
MOST_PENDING = 65_536
"""Events that wait for the bus; beyond these a snapshot is cheaper."""
MOST_PAUSE_S = 16.0

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
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``ranks`` tells what has changed in the gang since ``info``."""
        self._wall = wall
        self._bus = bus
        self._info = info
        self._ranks = ranks
        self._snapshot = snapshot
        self._pending: list[KvEvent] = []
        self._sequence = itertools.count()
        self._wants_snapshot = False
        self._failures = 0
        self._wake = asyncio.Event()
        self._in_touch = asyncio.Event()
        self._in_touch.set()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, events: list[KvEvent]) -> None:
        """Queue events; call it on the publisher's loop."""
        self._pending += events
        if not self._in_touch.is_set() or len(self._pending) > MOST_PENDING:
            self._drop_pending()
        self._wake.set()

    async def announce(self, info: ReplicaInfo) -> None:
        """That is what the replica is from now on: once it has started all are told at once, if the bus answers."""
        self._info = info
        if self._tasks:
            await self._beat()

    async def start(self) -> None:
        """Take the lease, then keep publishing in the background. A bus that is away is tried again there."""
        await self._beat()
        self._want_snapshot()
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
            await self._beat()

    async def _beat(self) -> None:
        try:
            wants_snapshot = await self._bus.heartbeat(self._info, LEASE_S)
        except ConnectionError as error:
            self._lost_touch(error)
            return
        if not self._in_touch.is_set():
            logger.info("the bus answers again")
            self._in_touch.set()
        if wants_snapshot:
            self._want_snapshot()

    async def _publish_forever(self) -> None:
        while True:
            await self._wake.wait()
            await self._in_touch.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            try:
                await self._publish()
                self._failures = 0
            except ConnectionError as error:
                self._lost_touch(error)
                await self._pause()
            except Exception:
                logger.exception("publishing failed; a snapshot will make up for it")
                self._drop_pending()
                await self._pause()

    async def _publish(self) -> None:
        if not self._wants_snapshot:
            await self._publish_pending()
            return
        self._wants_snapshot = False
        stored = await self._snapshot()
        # What is pending by now happened before the snapshot: with it, who is in step needs no snapshot.
        await self._publish_pending()
        parts = await asyncio.to_thread(self._encode_snapshot, stored)
        await self._bus.publish_snapshot(self._info.replica, self._info.epoch, *parts)

    async def _publish_pending(self) -> None:
        if not self._pending:
            return
        events, self._pending = self._pending, []
        if await self._bus.publish(self._info.replica, self._info.epoch, [self._encode(events)]):
            self._want_snapshot()

    def _encode_snapshot(self, stored: list[KvEvent]) -> list[bytes]:
        return [
            self._encode([SnapshotPart(number), *part], compress=True)
            for number, part in enumerate(snapshot_parts(stored))
        ]

    def _encode(self, events: list[KvEvent], *, compress: bool = False) -> bytes:
        batch = KvEventBatch(self._info.replica, self._info.epoch, next(self._sequence), tuple(events), self._wall())
        return encode(batch, compress=compress)

    def _lost_touch(self, error: ConnectionError) -> None:
        if self._in_touch.is_set():
            logger.warning("events wait for the bus: %s", error)
            self._in_touch.clear()
        self._drop_pending()

    def _drop_pending(self) -> None:
        """Forget events; the number left out tells readers that something is missing until the snapshot."""
        self._pending.clear()
        next(self._sequence)
        self._want_snapshot()

    async def _pause(self) -> None:
        """Longer and longer: what fails while hearts beat, such as for want of memory, may last."""
        self._failures += 1
        await asyncio.sleep(min(HEARTBEAT_S * 2 ** (self._failures - 1), MOST_PAUSE_S))

    def _want_snapshot(self) -> None:
        self._wants_snapshot = True
        self._wake.set()
