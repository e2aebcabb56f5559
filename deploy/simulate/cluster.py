"""Routers and replicas on one virtual clock, with late events, dead replicas and a bus that is away."""

import gc
import heapq
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random

from ...cluster.errors import OverloadedError, ReplicaUnavailableError, WarmrootError
from ...cluster.ids import BlockHash, Epoch, ReplicaId, RequestId
from ...cluster.messages import Load, ReplicaInfo
from ...kv_store.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch
from ...kv_store.hashing import HASH_BYTES, pack_tokens
from ...kv_store.index import PrefixIndex
from ...router.admission import QueueLimits
from ...router.core import RoutingCore, Ticket
from ...router.dispatch import PUMP_EVERY_S
from ...router.late_binding import LateBinding
from ...router.peer_exchange import BEAT_S, GATHER_S
from ...router.policy.base import Policy, RoutingRequest
from ...router.policy.rates import Kinds, ReplicaRates
from .block_cache import NO_PARENT, BlockCache
from .costs import ReplicaCosts
from .replica import SimSequence, SimulatedReplica
from .results import Outcome, Results
from .trace import Trace, TraceRequest

NAMESPACE = BlockHash(bytes(HASH_BYTES))
_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated."""

    num_replicas: int
    policy: Callable[[Random], Policy]
    late: LateBinding | None = None
    costs: ReplicaCosts = field(default_factory=ReplicaCosts)
    slow_share: float = 0.0
    """Share of replicas that take twice the time."""
    num_routers: int = 1
    event_lag_s: float = 0.02
    """From the end of a step to the routers' indexes: production gathers events for so long."""
    word_lag_s: float = 0.002
    """From one router to another."""
    kill_at: float | None = None
    """When the first replica dies."""
    restart_after: float = 30.0
    bus_down: tuple[float, float] | None = None
    """No event arrives in that time; a snapshot follows."""
    queue: QueueLimits | None = None
    """How much may wait in each router; None: anything."""
    caller: Callable[[int], "Caller"] = lambda number: ANYBODY
    """Who sends a request, by its number."""
    observe: Callable[[Outcome], None] = lambda outcome: None
    """Told of every request that is over, also of those that were refused for good."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A client."""

    tenant: str = ""
    priority: int = 0
    share: float = 1.0
    patience_s: float = 0.0
    """It comes back after a refusal if it is told to do so within this time."""


ANYBODY = Caller()


class _Member:
    """A replica as a router knows it; ``load`` is the object that the replica sent last."""

    __slots__ = ("info", "load", "rates")

    def __init__(self, info: ReplicaInfo, rates: ReplicaRates) -> None:
        self.info = info
        self.load = Load(kv_total_blocks=info.kv_total_blocks, max_num_seqs=info.max_num_seqs)
        self.rates = rates


class SimulatedRouter:
    """One ingress: the production core and index."""

    __slots__ = ("core", "index", "kinds", "members", "pumping", "telling", "told_at")

    def __init__(self, setup: Setup, clock: Callable[[], float], tokens_per_id: int, seed: int) -> None:
        self.index = PrefixIndex()
        policy = setup.policy(Random(seed))
        self.core = RoutingCore(
            self.index,
            policy,
            clock,
            late=setup.late,
            queue=setup.queue,
            tokens_per_id=tokens_per_id,
            history=1,
            name=str(seed),
        )
        self.members: dict[ReplicaId, _Member] = {}
        self.kinds = Kinds()
        self.pumping = False
        self.telling = False
        self.told_at = 0.0


class SimulatedCluster:
    """Replays one trace."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._trace = trace
        self._setup = setup
        self._rng = Random(setup.seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._epochs = itertools.count(1)
        self._seqs: dict[ReplicaId, int] = {}
        self._hashes: dict[int, BlockHash] = {}
        self._pending: dict[ReplicaId, list[KvEvent]] = {}
        self._left = len(trace.requests)
        self.results = Results(trace, setup.num_replicas)
        clock = self._clock
        self._routers = [
            SimulatedRouter(setup, clock, trace.block_tokens, setup.seed * 1000 + n) for n in range(setup.num_routers)
        ]
        if len(self._routers) > 1:
            for router in self._routers:
                router.core.peers.on_news = partial(self._tell_soon, router)
                self._beat(router)
        self._replicas: dict[ReplicaId, SimulatedReplica] = {}
        slow, usual = setup.costs.slowed(2.0), setup.costs
        self._costs = {
            ReplicaId(f"r{number}"): slow if number < setup.slow_share * setup.num_replicas else usual
            for number in range(setup.num_replicas)
        }
        self._start(list(self._costs))

    def run(self) -> Results:
        """Play it to the end."""
        setup = self._setup
        if setup.kill_at is not None:
            self._schedule(setup.kill_at, self._kill)
        if setup.bus_down is not None:
            self._schedule(setup.bus_down[1], self._resync)
        events = self._events
        for number, request in enumerate(self._trace.requests):
            while events and events[0][0] <= request.arrival_s:
                self._next()
            self._now = request.arrival_s
            self._arrive(number, request)
        while events and self._left:
            self._next()
        self.results.routing = [router.core.routing() for router in self._routers]
        return self.results

    def _clock(self) -> float:
        return self._now

    def _schedule(self, delay: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._numbers), call))

    def _next(self) -> None:
        self._now, _, call = heapq.heappop(self._events)
        call()

    def _arrive(self, number: int, request: TraceRequest) -> None:
        outcome = Outcome(number, request.arrival_s)
        router = self._routers[self._rng.randrange(len(self._routers)) if len(self._routers) > 1 else 0]
        self._route(router, request, outcome)

    def _route(self, router: SimulatedRouter, request: TraceRequest, outcome: Outcome) -> None:
        caller = self._setup.caller(outcome.number)
        question = RoutingRequest(
            RequestId(str(outcome.number)),
            request.input_tokens,
            tokens=pack_tokens(array("i", request.block_ids)),
            priority=caller.priority,
            tenant=caller.tenant,
            share=caller.share,
        )
        outcome.submitted_at = self._now

        def bound(ticket: Ticket) -> None:
            if ticket.refused is not None:
                self._refused(router, request, outcome, ticket.refused)
            if ticket.replica is not None:
                self._replicas[ticket.replica].submit(request, (router, ticket, outcome))

        try:
            ticket = router.core.submit(question, bound)
        except WarmrootError as error:
            self._refused(router, request, outcome, error)
            return
        if ticket.replica is None:
            self._pump_later(router)
        else:
            bound(ticket)

    def _refused(self, router: SimulatedRouter, request: TraceRequest, outcome: Outcome, error: WarmrootError) -> None:
        """Its client comes back when told, if that is not too late for it."""
        wait_s = error.retry_after if isinstance(error, OverloadedError) else inf
        outcome.refused.append((self._now, wait_s))
        if wait_s <= self._setup.caller(outcome.number).patience_s:
            self._schedule(wait_s, lambda: self._route(router, request, outcome))
        else:
            self._left -= 1
            self._setup.observe(outcome)

    def _pump_later(self, router: SimulatedRouter) -> None:
        if not router.pumping:
            router.pumping = True
            self._schedule(PUMP_EVERY_S, lambda: self._pump(router))

    def _pump(self, router: SimulatedRouter) -> None:
        router.pumping = False
        router.core.pump()
        if router.core.num_waiting:
            self._pump_later(router)

    def _beat(self, router: SimulatedRouter) -> None:
        """Tell the other routers everything, again and again."""
        self._tell(router, everything=True)
        router.core.peers.expire()
        if self._left:
            self._schedule(BEAT_S, lambda: self._beat(router))

    def _tell_soon(self, router: SimulatedRouter) -> None:
        if not router.telling:
            router.telling = True
            self._schedule(max(0.0, router.told_at + GATHER_S - self._now), lambda: self._tell(router))

    def _tell(self, router: SimulatedRouter, *, everything: bool = False) -> None:
        router.telling, router.told_at = False, self._now
        if self._bus_is_down():
            return
        word = router.core.peers.word(everything=everything)
        others = [other for other in self._routers if other is not router]
        self._schedule(self._setup.word_lag_s, lambda: [other.core.peers.hear(word) for other in others])

    def _start(self, names: Sequence[ReplicaId]) -> None:
        blocks = self._setup.costs.kv_tokens // self._trace.block_tokens
        infos = [_announcement(name, Epoch(next(self._epochs)), self._costs[name], blocks) for name in names]
        for router in self._routers:
            kinds = router.kinds.of([*(member.info for member in router.members.values()), *infos])
            for info in infos:
                router.members[info.replica] = _Member(info, ReplicaRates(kinds[info.replica]))
                router.core.join(router.members[info.replica])
        for info in infos:
            self._run_replica(info.replica, info.epoch)

    def _run_replica(self, name: ReplicaId, epoch: Epoch) -> None:
        self._seqs[name], self._pending[name] = 0, []
        cache = BlockCache(
            self._setup.costs.kv_tokens // self._trace.block_tokens,
            lambda parent, ids: self._pending[name].append(self._stored(parent, ids)),
            lambda ids: self._pending[name].append(BlocksRemoved(tuple(map(self._hash, ids)))),
        )

        def told(load: Load) -> None:
            for router in self._routers:
                router.members[name].load = load
                place = router.core.fleet.place(name)
                if place is not None:
                    router.core.fleet.told(place, load)
            self._publish(name, epoch)

        self._replicas[name] = SimulatedReplica(
            self._costs[name],
            self._trace.block_tokens,
            cache,
            self._clock,
            self._schedule,
            self._first,
            self._end,
            told,
        )

    def _first(self, sequence: SimSequence) -> None:
        router, ticket, outcome = sequence.tag
        if outcome.first_at is None:
            outcome.first_at, outcome.cached_tokens = self._now, sequence.cached_tokens
        router.core.first_token(ticket, sequence.cached_tokens)

    def _end(self, sequence: SimSequence) -> None:
        router, ticket, outcome = sequence.tag
        outcome.ended_at, outcome.replica = self._now, ticket.replica
        self._left -= 1
        self.results.add(outcome)
        self._setup.observe(outcome)
        router.core.finish(ticket, sequence.trace.output_tokens - 1)

    def _publish(self, name: ReplicaId, epoch: Epoch) -> None:
        events, self._pending[name] = self._pending[name], []
        if not events or self._bus_is_down():
            return
        seq = self._seqs[name]
        self._seqs[name] += 1
        batch = KvEventBatch(name, epoch, seq, tuple(events))
        if self._setup.event_lag_s:
            self._schedule(self._setup.event_lag_s, lambda: self._apply(batch))
        else:
            self._apply(batch)

    def _apply(self, batch: KvEventBatch) -> None:
        for router in self._routers:
            member = router.members.get(batch.replica)
            if member is not None and member.info.epoch == batch.epoch:
                router.index.apply(batch)

    def _bus_is_down(self) -> bool:
        down = self._setup.bus_down
        return down is not None and down[0] <= self._now < down[1]

    def _resync(self) -> None:
        """The bus is back: every replica publishes a snapshot."""
        for name, replica in self._replicas.items():
            if replica.alive:
                stored = [self._stored(parent, [block]) for parent, block in replica.cache.chains()]
                self._pending[name] = [CacheCleared(), *stored]
                self._publish(name, self._routers[0].members[name].info.epoch)

    def _kill(self) -> None:
        """The first replica dies: its connections break at once, its requests start again elsewhere."""
        name = ReplicaId("r0")
        lost = self._replicas[name].kill()
        for router in self._routers:
            router.core.leave(name)
            router.index.drop(name)
            del router.members[name]
        self._schedule(self._setup.restart_after, lambda: self._start([name]))
        for sequence in lost:
            router, ticket, outcome = sequence.tag
            router.core.finish(ticket)
            self.results.resubmitted += 1
            self._route(router, sequence.trace, outcome)

    def _hash(self, block: int) -> BlockHash:
        known = self._hashes.get(block)
        if known is None:
            half = ((block + 1) * _MIX % 2**64).to_bytes(8, "little")
            known = self._hashes[block] = BlockHash(half + half)
        return known

    def _stored(self, parent: int, ids: Sequence[int]) -> BlocksStored:
        above = NAMESPACE if parent == NO_PARENT else self._hash(parent)
        return BlocksStored(above, tuple(map(self._hash, ids)), array("i", ids).tobytes())


def simulate(trace: Trace, setup: Setup) -> Results:
    """Replay a trace. Raises ReplicaUnavailableError when there is nobody to send a request to."""
    if setup.num_replicas < 1 + (setup.kill_at is not None):
        raise ReplicaUnavailableError("no replica is left to send requests to")
    with uncollected():
        return SimulatedCluster(trace, setup).run()


@contextmanager
def uncollected() -> Iterator[None]:
    """There are no cycles to be found, and looking for them among a million requests takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _announcement(name: ReplicaId, epoch: Epoch, costs: ReplicaCosts, blocks: int) -> ReplicaInfo:
    """A block is one id of the trace, so the index compares ids where production compares tokens."""
    return ReplicaInfo(
        replica=name,
        epoch=epoch,
        model="simulated",
        address="",
        kv_namespace=NAMESPACE,
        block_size=1,
        kv_total_blocks=blocks,
        max_num_seqs=costs.max_num_seqs,
        max_num_batched_tokens=costs.max_num_batched_tokens,
        max_model_len=costs.kv_tokens,
        prefill_tokens_per_s=costs.prefill_tokens_per_s,
        decode_step_s=costs.decode_fixed_s + costs.decode_sequence_s,
    )
