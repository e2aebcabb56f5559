"""What ``bench router`` measures of our own router.

Times are of the thread's CPU, so that others on the machine matter less.
"""

import asyncio
import gc
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TypeVar

from ...cluster.ids import RequestId
from ...cluster.messages import Load, ReplicaInfo
from ...kv_store.bus import BusReader, ClusterBus, InMemoryBus
from ...kv_store.events import decode
from ...kv_store.hashing import TOKEN_BYTES, pack_tokens
from ...kv_store.index import PrefixIndex
from ...router.bus_follower import BusFollower
from ...router.core import RoutingCore, Ticket
from ...router.late_binding import LateBinding
from ...router.policy import RoutingRequest, make_policy
from ...router.policy.rates import Kind, ReplicaRates
from .metrics import percentile
from .router_load import BLOCK_SIZE, PROMPT_TOKENS, FleetLoad

T = TypeVar("T")

_IN_FLIGHT_PER_REPLICA = 4
_READ_BYTES = 2**20
"""Small, so that the hit rate is looked at often."""
_LEASE_S = 3600.0
_USEFUL = 0.9
_SAMPLED_PROMPTS = 400
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of the thread's CPU for each call."""

    p50_us: float
    p90_us: float
    p99_us: float
    mean_us: float

    @property
    def per_s(self) -> float:
        """Calls per second, one after the other."""
        return 1e6 / self.mean_us

    @classmethod
    def of(cls, call: Callable[[T], object], arguments: Iterable[T]) -> "Timed":
        """Time each call by itself."""
        clock, taken = time.thread_time_ns, list[int]()
        for argument in arguments:
            begin = clock()
            call(argument)
            taken.append(clock() - begin)
        return cls.from_ns(taken)

    @classmethod
    def from_ns(cls, taken: Sequence[int]) -> "Timed":
        """From nanoseconds."""
        p50, p90, p99 = (percentile(taken, percent) / 1e3 for percent in (50, 90, 99))
        return cls(p50, p90, p99, sum(taken) / len(taken) / 1e3)


@dataclass(frozen=True, slots=True)
class Applied:
    """An index filled from encoded batches."""

    stored_blocks_per_s: float
    """Decoding and applying, by the thread's CPU."""
    num_blocks: int
    bytes_per_token: float
    """Growth of this process for each token of the distinct blocks."""


def fill(index: PrefixIndex, batches: Iterable[bytes]) -> Applied:
    """Decode and apply; the batches may be made while they are read."""
    gc.collect()
    memory, spent_ns, stored = resident_bytes(), 0, 0
    for data in batches:
        begin = time.thread_time_ns()
        batch = decode(data)
        index.apply(batch)
        spent_ns += time.thread_time_ns() - begin
        stored += sum(len(getattr(event, "hashes", ())) for event in batch.events)
    gc.collect()
    tokens = index.num_blocks * BLOCK_SIZE
    return Applied(stored / spent_ns * 1e9, index.num_blocks, (resident_bytes() - memory) / tokens)


def lookups(index: PrefixIndex, load: FleetLoad, prompts: Sequence[bytes]) -> Timed:
    """``PrefixIndex.held`` of each prompt."""
    return quietest(lambda: Timed.of(lambda tokens: index.held(load.root, tokens, BLOCK_SIZE), prompts))


def quietest(measure: Callable[[], Timed]) -> Timed:
    """The least disturbed of a few runs."""
    return min((measure() for _ in range(_RUNS)), key=lambda timed: timed.mean_us)


@dataclass(slots=True, eq=False)
class KnownReplica:
    """See ``fleet.KnownReplica``."""

    info: ReplicaInfo
    load: Load
    rates: ReplicaRates


@dataclass(frozen=True, slots=True)
class Decisions:
    """Choosing and reserving for prompts while earlier ones are in flight."""

    from_ids: Timed
    """From a list of token ids: packing, lookup, choice, reservation."""
    from_packed: Timed
    """The same from packed ids, as an ingress has them."""
    endings: Timed
    """First token and end of a request."""


def decisions(index: PrefixIndex, load: FleetLoad, prompts: Sequence[bytes], *, late: bool = True) -> Decisions:
    """Of a ``RoutingCore`` over all replicas."""
    rng, ids = Random(0), count()
    binding = LateBinding(backlog_s=1e9) if late else None
    core = RoutingCore(index, make_policy(rng=rng), time.monotonic, late=binding)
    for info in load.infos():
        word = Load(running=rng.randrange(8), kv_total_blocks=info.kv_total_blocks, max_num_seqs=info.max_num_seqs)
        core.join(KnownReplica(info, word, ReplicaRates(Kind(info.prefill_tokens_per_s, info.decode_step_s))))
    flying: deque[Ticket] = deque()
    endings: list[int] = []

    def submit(tokens: bytes) -> None:
        request = RoutingRequest(RequestId(str(next(ids))), len(tokens) // TOKEN_BYTES, tokens=tokens)
        flying.append(core.submit(request, lambda ticket: None))

    def land(arguments: Iterable[T]) -> Iterable[T]:
        for argument in arguments:
            yield argument
            if len(flying) > _IN_FLIGHT_PER_REPLICA * len(load.names):
                ticket = flying.popleft()
                begin = time.thread_time_ns()
                core.first_token(ticket, PROMPT_TOKENS // 2)
                core.finish(ticket, 100)
                endings.append(time.thread_time_ns() - begin)

    for tokens in land(prompts):
        submit(tokens)
    endings.clear()

    def from_ids() -> Timed:
        lists = (array("i", tokens).tolist() for tokens in prompts)
        return Timed.of(lambda token_ids: submit(pack_tokens(token_ids)), land(lists))

    return Decisions(quietest(from_ids), quietest(lambda: Timed.of(submit, land(prompts))), Timed.from_ns(endings))


@dataclass(frozen=True, slots=True)
class Joined:
    """A router that starts beside replicas whose snapshots lie on the bus.

    Seconds of its thread's CPU, and by the wall.
    """

    useful_s: float
    """Until its hit rate is 90 % of the final one."""
    complete_s: float
    useful_wall_s: float
    complete_wall_s: float
    hit_rate: float
    num_blocks: int


async def publish_snapshots(bus: ClusterBus, load: FleetLoad) -> None:
    """Leases and snapshots of all replicas."""
    for info in load.infos():
        await bus.heartbeat(info, _LEASE_S)
    for name, parts in load.snapshots():
        await bus.publish_snapshot(name, 1, *parts)


async def join(bus: BusReader, load: FleetLoad, prompts: Sequence[bytes]) -> Joined:
    """Follow the bus from nothing to the end."""
    index = PrefixIndex()
    follower = BusFollower(bus, index, lambda infos: None)
    asked = prompts[:_SAMPLED_PROMPTS]
    begun_cpu, begun = time.thread_time(), time.monotonic()
    sampling_cpu = sampling = 0.0
    points: list[tuple[float, float, float]] = []
    blocks = -1
    while index.num_blocks != blocks or not blocks:
        blocks = index.num_blocks
        await follower.follow_once(0.05)
        cpu, wall = time.thread_time(), time.monotonic()
        points.append((cpu - begun_cpu - sampling_cpu, wall - begun - sampling, _hit_rate(index, load, asked)))
        sampling_cpu += time.thread_time() - cpu
        sampling += time.monotonic() - wall
    final = points[-1][2]
    complete = next(point for point in points if point[2] == final)
    useful = next(point for point in points if point[2] >= _USEFUL * final)
    return Joined(useful[0], complete[0], useful[1], complete[1], final, blocks)


def join_in_memory(load: FleetLoad, prompts: Sequence[bytes]) -> Joined:
    """``join`` over a bus in this process."""

    async def run() -> Joined:
        bus = InMemoryBus(time.monotonic, "bench", read_bytes=_READ_BYTES)
        await publish_snapshots(bus, load)
        return await join(bus, load, prompts)

    return asyncio.run(run())


def _hit_rate(index: PrefixIndex, load: FleetLoad, prompts: Sequence[bytes]) -> float:
    """Share of prompt tokens that the replica which holds most of a prompt has cached."""
    found = (index.held(load.root, tokens, BLOCK_SIZE) for tokens in prompts)
    hit = sum(max((tokens for _, tokens in held), default=0) for held in found)
    return hit / sum(len(tokens) // TOKEN_BYTES for tokens in prompts)


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
