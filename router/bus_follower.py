"""Keeps a prefix index in step with the event bus and tells who lives."""

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf

from ..cluster.histogram import Histogram
from ..cluster.ids import ReplicaId
from ..cluster.messages import ReplicaInfo
from ..kv_store.bus import BusEntry, BusReader, Cursor
from ..kv_store.events import decode
from ..kv_store.index import Applied, PrefixIndex
from ..kv_store.prefix_tree import LatestBlocks
from .openai.cluster_state import LAG_S

READ_S = 0.5
MEMBERS_S = 0.5
RETRY_S = 0.5
SNAPSHOT_EVERY_S = 1.0
"""At most one snapshot of a replica is asked for in this time."""
SILENT_S = 2.0
"""A replica that has lived for so long without having told what it holds is asked."""

logger = logging.getLogger(__name__)


class BusFollower:
    """Applies every replica's events to ``index`` and calls ``on_members`` with all leased replicas, time and again.

    Nothing that a replica sends stops it: bad entries are skipped and counted in ``skipped``, gaps in ``gaps`` and
    mended by snapshots, batches that contradict what is known in ``conflicts``, replicas that were asked anew because
    what they had told was wrong in ``resyncs``. ``silent`` are replicas that live and tell nothing that can be
    followed. While the bus cannot be reached everything stays as it was, and ``fault`` says why.
    """

    def __init__(
        self,
        bus: BusReader,
        index: PrefixIndex,
        on_members: Callable[[list[ReplicaInfo]], None],
        clock: Callable[[], float] = time.monotonic,
        model: str | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``model``: only its replicas matter; None: all do. ``wall`` is the clock by which replicas stamp batches."""
        self.event_lag_s = Histogram(LAG_S)
        """From the sender to the index; as good as the nodes' clocks agree."""
        self._wall = wall
        self.skipped = 0
        self.gaps = 0
        self.conflicts = 0
        self.resyncs = 0
        self.silent: set[ReplicaId] = set()
        self.latest = LatestBlocks()
        """What was stored last, anywhere."""
        self._contradictory: set[ReplicaId] = set()
        self.fault = ""
        self._bus = bus
        self._index = index
        self._on_members = on_members
        self._clock = clock
        self._cursor: Cursor = {}
        self._lost: set[str] = set()
        self._asked: dict[str, float] = {}
        self._unheard_since: dict[ReplicaId, float] = {}
        self._members_seen = float("-inf")
        self._model = model
        self._strangers: set[str] = set()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await self._follow_safely()

    async def _follow_safely(self) -> None:
        try:
            await self.follow_once(READ_S)
            self.fault = ""
        except ConnectionError as error:
            if not self.fault:
                logger.warning("routing on what is known: %s", error)
            self.fault = str(error) or "the bus does not answer"
            await asyncio.sleep(RETRY_S)
        except Exception:
            logger.exception("following the event bus failed; going on")
            await asyncio.sleep(RETRY_S)

    async def follow_once(self, timeout_s: float) -> None:
        """One read and what follows from it."""
        entries, self._cursor = await self._bus.read(self._cursor, timeout_s)
        for entry in entries:
            if entry.replica in self._strangers:
                continue
            self._take(entry)
            # A snapshot takes tens of milliseconds; streams must not wait for a row of them.
            await asyncio.sleep(0)
        await self._ask_for_snapshots()
        if not entries or self._clock() - self._members_seen >= MEMBERS_S:
            members = self._own(await self._bus.members())
            self._members_seen = self._clock()
            self._lost &= {member.replica for member in members}
            self._listen(members)
            self._on_members(members)

    def resync(self, replica: ReplicaId) -> None:
        """What is known of a replica is wrong: begin anew with a snapshot."""
        self.resyncs += 1
        self._index.drop(replica)
        self._lost.add(replica)

    def _own(self, members: list[ReplicaInfo]) -> list[ReplicaInfo]:
        """The model's replicas. What the others hold would only fill the index."""
        own = [member for member in members if self._model in (None, member.model)]
        strangers = {member.replica for member in members} - {member.replica for member in own}
        for replica in strangers - self._strangers:
            self._index.drop(ReplicaId(replica))
        self._strangers = set[str](strangers)
        return own

    def _listen(self, members: list[ReplicaInfo]) -> None:
        """Who lives and tells nothing would have a cold cache for ever, as far as a router can see: ask it."""
        now = self._clock()
        unheard = [member.replica for member in members if not self._index.follows(member.replica, member.epoch)]
        self._unheard_since = {replica: self._unheard_since.get(replica, now) for replica in unheard}
        silent = {replica for replica, since in self._unheard_since.items() if now - since >= SILENT_S}
        for replica in sorted(silent - self.silent):
            logger.warning("replica %s lives but does not tell what it has cached; asking it", replica)
        self.silent = silent
        self._lost |= silent

    def _take(self, entry: BusEntry) -> None:
        try:
            batch = decode(entry.data)
            if batch.replica != entry.replica:
                raise ValueError(f"it claims to be of {batch.replica}")
            conflicts = self._index.conflicts_of(batch.replica)
            applied = self._index.apply(batch)
            if applied is Applied.APPLIED:
                self.latest.note(batch.events)
            if 0 < batch.sent_at < inf:
                self.event_lag_s.observe(max(0.0, self._wall() - batch.sent_at))
            if self._index.conflicts_of(batch.replica) > conflicts:
                self._contradicted(batch.replica)
        except Exception as error:  # one replica's garbage must not stop the others' events
            self.skipped += 1
            logger.warning("skipping an event batch of %s: %s", entry.replica, error)
            self._index.drop(ReplicaId(entry.replica))
            applied = Applied.GAP
        if applied is Applied.GAP:
            self.gaps += 1
            self._lost.add(entry.replica)
        elif applied is Applied.APPLIED:
            self._lost.discard(entry.replica)

    def _contradicted(self, replica: ReplicaId) -> None:
        """What is known stays; it is told once for each replica."""
        self.conflicts += 1
        if replica not in self._contradictory:
            self._contradictory.add(replica)
            logger.warning("replica %s contradicts what is known of equal tokens or hashes; leaving that out", replica)

    async def _ask_for_snapshots(self) -> None:
        """Of those that a later entry has not set right; again and again until one does."""
        now = self._clock()
        for replica in sorted(self._lost):
            if now - self._asked.get(replica, float("-inf")) >= SNAPSHOT_EVERY_S:
                await self._bus.request_snapshot(replica)
                self._asked[replica] = now
