"""The replicas of a cluster as one router knows them: who lives, a channel to each, and what each has cached."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..cluster.engine_counts import EngineCounts
from ..cluster.ids import ReplicaId
from ..cluster.messages import GenerateRequest, Load, ReplicaInfo, TokenDelta
from ..cluster.time_limits import TimeLimits
from ..cluster.within import within
from ..kv_store.bus import BusReader
from ..kv_store.index import PrefixIndex
from .bus_follower import BusFollower
from .channel_client import ChannelClient
from .channel_tls import ChannelTls
from .openai.cluster_state import ReplicaState, ReplicaStatus, StoreStatus
from .policy.rates import Kind, Kinds, ReplicaRates

logger = logging.getLogger(__name__)


class ReplicaStream(Protocol):
    """Deltas of one request; ``close`` before the last one aborts it."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta: ...

    def close(self) -> None:
        """The consumer is through with it."""
        ...


class ReplicaClient(Protocol):
    """A way to one replica, as ``ChannelClient`` is."""

    load: Load
    counts: EngineCounts

    @property
    def connected(self) -> bool:
        """Whether a request can be submitted now."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the replica takes no more requests, and finishes what it has."""
        ...

    def start(self) -> None:
        """Connect, and stay connected, in the background."""
        ...

    async def close(self) -> None:
        """Disconnect for good."""
        ...

    async def ask(self, what: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Have it do something besides generating; raises a WarmrootError when it does not."""
        ...

    async def submit(self, request: GenerateRequest) -> ReplicaStream:
        """Its deltas, once it is accepted; raises a WarmrootError when it is not."""
        ...


Connect = Callable[[ReplicaInfo, Callable[[], None]], ReplicaClient]
"""Makes a client that calls the function whenever ``connected`` or ``draining`` changes."""


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of a replica."""

    info: ReplicaInfo
    client: ReplicaClient
    rates: ReplicaRates
    leased: bool = True

    @property
    def load(self) -> Load:
        """Its latest word."""
        return self.client.load

    @property
    def state(self) -> ReplicaState:
        """Without a lease it finishes what it has; without a connection nothing reaches it."""
        if not self.client.connected:
            return ReplicaState.UNHEALTHY
        return ReplicaState.READY if self.leased and not self.client.draining else ReplicaState.DRAINING


class Membership:
    """Follows ``bus``: connects to who joins, forgets who is gone, keeps ``index`` in step.

    ``token`` opens the replicas' channels. A replica whose lease ends gets no new request; it is forgotten, with what
    it had cached, once its connection is gone too.
    """

    def __init__(
        self,
        bus: BusReader,
        token: str,
        *,
        index: PrefixIndex | None = None,
        connect: Connect | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str | None = None,
        limits: TimeLimits | None = None,
        tls: ChannelTls | None = None,
    ) -> None:
        """``model``: only its replicas are members; None: all are. ``limits`` and ``tls`` are those of the channels."""
        self.index = index or PrefixIndex()
        self.model = model or ""
        self._bus = bus
        self.follower = BusFollower(bus, self.index, self._update, clock, model)
        self._connect = connect or (
            lambda info, on_change: ChannelClient(info, token, on_change, limits=limits, tls=tls)
        )
        self.joined: Counter[str] = Counter()
        """Replicas that came, by kind: ``single``, or a ``gang`` of several ranks."""
        self.gone: Counter[str] = Counter()
        """Those that ended or were lost."""
        self._members: dict[ReplicaId, Member] = {}
        self._ready: Sequence[Member] | None = None
        self._kinds = Kinds()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Follow in the background."""
        self._spawn(self.follower.run())

    async def close(self) -> None:
        """Stop following and disconnect; open streams fail."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(member.client.close() for member in self._members.values()))

    def ready(self) -> Sequence[Member]:
        """Who can be given a request now: the same object until that changes."""
        if self._ready is None:
            self._ready = [member for member in self._members.values() if member.state is ReplicaState.READY]
        return self._ready

    def leased(self) -> list[Member]:
        """Who is announced, whether it can be reached or not."""
        return [member for member in self._members.values() if member.leased]

    async def wait_ready(self, timeout_s: float) -> Sequence[Member]:
        """``ready()``, after waiting up to ``timeout_s`` for the first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (ready := self.ready()) and (left := deadline - loop.time()) > 0:
            await self.wait_changed(left)
        return ready

    async def wait_changed(self, timeout_s: float) -> None:
        """Until some replica may have become ready, or stopped to be, or that time has passed."""
        with suppress(asyncio.TimeoutError):
            await within(timeout_s, self._changed.wait())

    def replicas(self) -> list[ReplicaStatus]:
        """Every known replica, for the API."""
        return [
            ReplicaStatus(info=member.info, state=member.state, load=member.load, counts=member.client.counts)
            for member in self._members.values()
        ]

    def resync(self, replica: ReplicaId) -> None:
        """Forget what a replica is said to hold, and ask it."""
        self.follower.resync(replica)

    def store(self) -> StoreStatus:
        """The bus and what was learned from it, for the API."""
        follower = self.follower
        return StoreStatus(
            store=self._bus.store,
            fault=follower.fault,
            index_blocks=self.index.num_blocks,
            gaps=follower.gaps,
            skipped=follower.skipped,
            conflicts=follower.conflicts,
            resyncs=follower.resyncs,
            silent=len(follower.silent),
        )

    def _update(self, infos: list[ReplicaInfo]) -> None:
        leased = {info.replica: info for info in infos}
        for replica, member in list(self._members.items()):
            member.leased = replica in leased
            if not member.leased and not member.client.connected:
                self._forget(replica)
        for replica, kind in self._kinds.of(infos).items():
            info, member = leased[replica], self._members.get(replica)
            if member is None or (member.info.epoch, member.info.address) != (info.epoch, info.address):
                self._join(info, kind)
                continue
            if member.info.kv_namespace != info.kv_namespace:  # what knows the replica by it must learn it anew
                member = self._members[replica] = replace(member, info=info)
            member.info = info
            if member.rates.kind is not kind and not member.rates.kind.has_learned:
                self._members[replica] = replace(member, rates=ReplicaRates(kind))
        self._notify()

    def _join(self, info: ReplicaInfo, kind: Kind) -> None:
        if (before := self._members.pop(info.replica, None)) is not None:
            self.gone[_kind(before.info)] += 1
            self._spawn(before.client.close())
        self.joined[_kind(info)] += 1
        self.index.drop(info.replica, before=info.epoch)  # what it held before it was started again
        client = self._connect(info, self._notify)
        self._members[info.replica] = Member(info, client, ReplicaRates(kind))
        client.start()
        logger.info("replica %s joined at %s", info.replica, info.address)

    def _forget(self, replica: ReplicaId) -> None:
        member = self._members.pop(replica)
        self.gone[_kind(member.info)] += 1
        self._spawn(member.client.close())
        self.index.drop(replica)
        logger.info("replica %s is gone", replica)

    def _notify(self) -> None:
        self._ready = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kind(info: ReplicaInfo) -> str:
    return "gang" if info.ranks else "single"
