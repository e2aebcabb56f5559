"""Sees that what is hot is cached: tells the bus, and has replicas compute prefixes that too few of them hold.

One rule does it: every hot prefix is held by a replica that is ready, and by as many as the requests with it keep busy.
So a prefix that outgrows one replica is copied, and one whose replica drains, dies or forgets it moves on.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import ceil

import numpy as np

from ..cluster.errors import WarmrootError
from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import GenerateRequest, ReplicaInfo
from ..cluster.sampling_params import SamplingParams
from ..kv_store.bus import BusReader
from ..kv_store.hashing import TOKEN_BYTES, unpack_tokens
from ..kv_store.hot_prefixes import HotPrefix
from .dispatch import Dispatcher
from .policy.base import Candidates, Column, RoutingRequest

TOLD = 16
"""Hot prefixes that a router tells of, and that are looked after."""
TELL_S = 5.0
LOOK_S = 0.5
"""How often it is looked whether replicas came or went."""
KEPT_S = 600.0
"""The table outlives a pause, and routers that are restarted."""
FULL = 0.7
"""A replica that the requests with one prefix keep busier than this has too much of it."""
WORTH_S = 30.0
"""A prefix that is used less often than this is computed again by who wants it."""
AGAIN_S = 60.0
"""A replica that lost what it was asked to compute sooner than this has no room for it."""
LOWEST_PRIORITY = 1000
"""Requests of users go first, however late they come."""

logger = logging.getLogger(__name__)


def replay(prefix: HotPrefix, request_id: str) -> GenerateRequest:
    """The request that leaves ``prefix`` in a replica's cache: it generates one token, after all others."""
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=unpack_tokens(prefix.tokens),
        params=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
        priority=LOWEST_PRIORITY,
        cache_salt=prefix.salt,
        packed_prompt=prefix.tokens,
    )


async def warm_up(bus: BusReader, info: ReplicaInfo, run: Callable[[GenerateRequest], Awaitable[None]]) -> int:
    """Have a replica that serves nobody yet compute what is hot, hottest first; ``run`` serves a request to its end.

    Returns how many prefixes it holds then. It stops at half of the replica's memory.
    """
    cache, room = (info.kv_namespace, info.block_size), info.kv_total_blocks // 2
    prefixes = [prefix for prefix in await bus.hot(TOLD) if (prefix.namespace, prefix.block_size) == cache]
    for number, prefix in enumerate(prefixes):
        room -= len(prefix.tokens) // (TOKEN_BYTES * prefix.block_size)
        if room < 0:
            return number
        await run(replay(prefix, f"warm-up-{number}"))
    return len(prefixes)


def copy_target(prefix: HotPrefix, candidates: Candidates, caches: Sequence[bool]) -> ReplicaId | None:
    """Who should hold ``prefix`` too: the idlest of those who could and do not; None: enough do, or all are busy.

    ``caches``: for each candidate, whether its cache has the prefix's namespace and block size.
    """
    num_tokens = len(prefix.tokens) // TOKEN_BYTES
    able = np.array(caches, dtype=np.bool_)
    holders = int(np.sum(able & (candidates.cached_tokens >= num_tokens)))
    if prefix.heat * WORTH_S < num_tokens or holders >= max(1, ceil(prefix.load / FULL)):
        return None
    slots, memory = candidates.occupancy / candidates.table[Column.MAX_NUM_SEQS], candidates.table[Column.KV_USAGE]
    free = able & (candidates.cached_tokens < num_tokens)
    free &= (candidates.backlog_s == 0) & (slots < FULL) & (memory < FULL)
    if not free.any():
        return None
    # Routers that look at the same time choose the same: the names decide between equals.
    return min(zip(slots[free].tolist(), np.array(candidates.names)[free].tolist(), strict=True))[1]


class HotKeeper:
    """Runs in the background of one router from ``start`` to ``close``. ``name`` tells the router from all others."""

    def __init__(self, bus: BusReader, dispatcher: Dispatcher, name: str) -> None:
        self._bus = bus
        self._dispatcher = dispatcher
        self._name = name
        self._numbers = itertools.count()
        self._recent: dict[tuple[str, bytes, ReplicaId | None], float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call it on the router's event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """What is being computed is finished all the same."""
        if self._task is not None:
            self._task.cancel()

    async def once(self) -> None:
        """Tell, and look after what is hot anywhere. Raises ConnectionError while the bus is away."""
        hottest = self._dispatcher.heat.hottest(TOLD)
        self._dispatcher.overview.hot = hottest
        await self._bus.put_hot(self._name, hottest, KEPT_S)
        if self._dispatcher.core.policy.binds_late:  # others do not look at who has which prefix
            self._dispatcher.overview.hot = await self._bus.hot(TOLD)
            await self._look_after(self._dispatcher.overview.hot)

    async def _look_after(self, prefixes: Iterable[HotPrefix]) -> None:
        now = asyncio.get_running_loop().time()
        self._recent = {key: at for key, at in self._recent.items() if now - at < AGAIN_S}
        caches = self._dispatcher.sync().fleet.caches
        for prefix in prefixes:
            if (prefix.namespace, prefix.block_size) not in caches:
                continue  # of another model, or of weights that nobody has any more
            replica = self._target(prefix)
            key = prefix.salt, prefix.tokens, replica
            if replica is not None and key not in self._recent:
                self._recent[key] = now
                await self._replay(prefix, replica)

    def _target(self, prefix: HotPrefix) -> ReplicaId | None:
        core = self._dispatcher.sync()
        if not len(core.fleet):
            return None
        num_tokens = len(prefix.tokens) // TOKEN_BYTES
        question = RoutingRequest(RequestId(""), num_tokens, tokens=prefix.tokens, salt=prefix.salt)
        cache = prefix.namespace, prefix.block_size
        infos = [core.fleet.member(name).info for name in core.fleet.names]
        caches = [(info.kv_namespace, info.block_size) == cache for info in infos]
        return copy_target(prefix, core.candidates(question), caches)

    async def _replay(self, prefix: HotPrefix, replica: ReplicaId) -> None:
        request = replay(prefix, f"warm-up-{self._name}-{next(self._numbers)}")
        try:
            await self._dispatcher.warm_up(replica, request)
        except WarmrootError as error:
            logger.info("replica %s does not warm up: %s", replica, error)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due, ready = loop.time(), self._dispatcher.ready()
        while True:
            await asyncio.sleep(LOOK_S)
            if loop.time() < due and self._dispatcher.ready() is ready:
                continue
            due, ready = loop.time() + TELL_S, self._dispatcher.ready()
            try:
                await self.once()
            except ConnectionError as error:
                logger.debug("nobody hears what is hot: %s", error)
            except Exception:
                logger.exception("looking after hot prefixes failed; going on")
