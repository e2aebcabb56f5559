"""A simulated cluster whose replicas come and go as a scaler says."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...cluster.demand import Demand
from ...cluster.ids import ReplicaId
from ...kv_store.heat import HeatWindow
from ...router.demand import demand_of
from ...router.warm_up import TOLD
from .block_cache import NO_PARENT
from .cluster import NAMESPACE, Setup, SimulatedCluster, SimulatedRouter
from .replica import SimSequence
from .results import Outcome
from .trace import Trace, TraceRequest

TICK_S = 1.0
MOST_WARM_UP_S = 30.0
"""As in ``actors/replica.py``."""


class View(NamedTuple):
    """What a scaler is shown every ``TICK_S``."""

    now: float
    ready: int
    target: int
    ongoing: int
    """Requests that came and have not ended."""
    demands: Callable[[], list[Demand]]
    """Each router's word."""


class Scaler(Protocol):
    """Says how many replicas there shall be."""

    def target(self, view: View) -> int:
        """From now on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """How replicas come and go."""

    start_s: float = 90.0
    """From the decision until the weights are loaded; what is hot is computed after that."""
    drain_s: float = 20.0
    """What has not ended on a replica that stops begins again elsewhere after that."""


@dataclass(slots=True)
class Bill:
    """What was paid for, and when the number changed."""

    replica_s: float = 0.0
    """From the decision to start a replica until it was gone."""
    changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(when, how many there were to be from then on)."""
    handed_back: int = 0


class ElasticCluster(SimulatedCluster):
    """Replays one trace, beginning with ``setup.num_replicas``."""

    def __init__(self, trace: Trace, setup: Setup, scaler: Scaler, elasticity: Elasticity) -> None:
        self._held: list[tuple[TraceRequest, Outcome]] = []
        self._born: dict[ReplicaId, float] = {}
        self._starting: list[ReplicaId] = []
        self._serving: list[ReplicaId] = []
        self._came = setup.num_replicas
        super().__init__(trace, setup)
        self._scaler = scaler
        self._elasticity = elasticity
        self._heat = HeatWindow(self._clock)
        self._target = setup.num_replicas
        self.bill = Bill(changes=[(0.0, setup.num_replicas)])
        self._serving = list(self._costs)
        self._born = dict.fromkeys(self._serving, 0.0)
        self._schedule(TICK_S, self._tick)

    def finish(self) -> Bill:
        """Count what is still there at the end."""
        self.bill.replica_s += sum(self._now - born for born in self._born.values())
        return self.bill

    def _tick(self) -> None:
        view = View(self._now, len(self._serving), self._target, self._ongoing(), self._demands)
        wanted = self._scaler.target(view)
        if wanted != self._target:
            self.bill.changes.append((self._now, wanted))
            self._target = wanted
        while len(self._serving) + len(self._starting) < wanted:
            self._add()
        while self._starting and len(self._serving) + len(self._starting) > wanted:
            self._pay(self._starting.pop())
        while len(self._serving) > wanted:
            self._drain(self._serving.pop())
        if self._left:
            self._schedule(TICK_S, self._tick)

    def _ongoing(self) -> int:
        routers = (router.core for router in self._routers)
        return len(self._held) + sum(core.num_waiting + core.in_flight.queued()[0] for core in routers)

    def _demands(self) -> list[Demand]:
        tokens = sum(request.input_tokens for request, _ in self._held)
        held = [(len(self._held), tokens), *[(0, 0)] * (len(self._routers) - 1)]
        return [
            demand_of(router.core, router.core.peers.name, held=count, held_tokens=held_tokens)
            for router, (count, held_tokens) in zip(self._routers, held, strict=True)
        ]

    def _add(self) -> None:
        name = ReplicaId(f"r{self._came}")
        self._came += 1
        self._costs[name] = self._setup.costs
        self._born[name] = self._now
        self._starting.append(name)
        self._schedule(self._elasticity.start_s, lambda: self._warm_up(name))

    def _warm_up(self, name: ReplicaId) -> None:
        """Weights are there; it computes what is hot before it serves."""
        if name not in self._starting:
            return
        hot = [tuple(array("i", prefix.tokens)) for prefix in self._heat.hottest(TOLD)]
        blocks = len({block for ids in hot for block in ids})
        seconds = sum(self._setup.costs.prompt_s(self._trace.block_tokens) for _ in range(blocks))
        self._schedule(min(seconds, MOST_WARM_UP_S), lambda: self._serve(name, hot))

    def _serve(self, name: ReplicaId, hot: list[tuple[int, ...]]) -> None:
        if name not in self._starting:
            return
        self._starting.remove(name)
        self._start([name])
        self._serving.append(name)
        cache = self._replicas[name].cache
        for ids in hot:
            held = cache.leading(ids)
            if cache.missing(ids) <= cache.available:
                cache.hold(ids[:held])
                cache.store(ids[held - 1] if held else NO_PARENT, ids[held:])
                cache.release(ids)
        self._publish(name, self._routers[0].members[name].info.epoch)
        held_back, self._held = self._held, []
        for request, outcome in held_back:
            self._route(self._routers[0], request, outcome)

    def _route(self, router: SimulatedRouter, request: TraceRequest, outcome: Outcome) -> None:
        if len(router.core.fleet):
            super()._route(router, request, outcome)
        else:
            self._held.append((request, outcome))

    def _first(self, sequence: SimSequence) -> None:
        tokens = array("i", sequence.trace.block_ids).tobytes()
        blocks = sequence.cached_tokens // self._trace.block_tokens
        self._heat.note(NAMESPACE, 1, "", tokens, blocks, 0.0)
        super()._first(sequence)

    def _drain(self, name: ReplicaId) -> None:
        for router in self._routers:
            router.core.leave(name)
        self._schedule(self._elasticity.drain_s, lambda: self._end_of(name))

    def _end_of(self, name: ReplicaId) -> None:
        lost = self._replicas[name].kill()
        self._pay(name)
        for router in self._routers:
            router.index.drop(name)
            del router.members[name]
        for sequence in lost:
            router, ticket, outcome = sequence.tag
            router.core.finish(ticket)
            self.bill.handed_back += 1
            self._route(router, sequence.trace, outcome)

    def _pay(self, name: ReplicaId) -> None:
        self.bill.replica_s += self._now - self._born.pop(name)
