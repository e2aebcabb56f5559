"""More requests than simulated replicas can serve: what gets through in time, what is refused, and whether clients are
told the truth about when to come back. The router is production's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from operator import and_
from random import Random
from typing import Any

import numpy as np

from ...router.admission import QueueLimits
from ...router.late_binding import LateBinding
from .cluster import Caller, simulate
from .costs import ReplicaCosts
from .generators import chat
from .results import Outcome
from .scenario import setup_of

HEAVY, LIGHT = "heavy", "light"
"""Tenants with equal shares; the first sends ten times as much."""
COSTS = ReplicaCosts(max_num_seqs=64, max_prefill_chunk=1024)
"""The two limits that bound the time between tokens, whatever the load; the queue bounds the time to the first one."""
TTFT_FACTOR, ITL_FACTOR = 20.0, 15.0
"""The SLO: so many times what an idle replica needs."""
PATIENCE_S = 15.0
"""A client that is told to wait for longer gives up."""
_QUIET_RPS = 0.05
_WARM_UP = 0.3
"""Share of the time that does not count."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must not exceed to count: seconds to the first token, and for each further one."""

    ttft_s: float
    itl_s: float

    def is_met(self, ttft_s: float, itl_s: float) -> bool:
        """Whether a request with these times counts."""
        return ttft_s <= self.ttft_s and itl_s <= self.itl_s


class Overload:
    """A fleet and its traffic: conversations of two tenants, arriving at random (Poisson)."""

    def __init__(
        self,
        num_replicas: int = 4,
        requests: int = 4000,
        costs: ReplicaCosts | None = None,
        seed: int = 0,
        *,
        bounded: bool = True,
    ) -> None:
        """``bounded``: whether the queue is; the same without shows what that is good for."""
        self._num_replicas = num_replicas
        self._trace = chat(requests, seed)
        self._costs = costs or COSTS
        self._seed = seed
        self._bounded = bounded

    def curve(self, loads: Sequence[float]) -> dict[str, Any]:
        """Capacity, SLO, and what happens at each multiple of the capacity."""
        capacity, slo = self.capacity(), self.slo()
        rows = [{"load": load, **self.at(load * capacity, slo)} for load in loads]
        return {"capacity_rps": capacity, "slo": asdict(slo), "loads": rows}

    def capacity(self) -> float:
        """Requests per second that end while all of them wait from the beginning, without the first and last tenth."""
        ends = np.sort([outcome.ended_at or inf for outcome in self._run(1e6, None)])
        first, last = len(ends) // 10, len(ends) * 9 // 10
        return float((last - first) / (ends[last] - ends[first]))

    def slo(self) -> Slo:
        """Multiples of what requests take that meet nobody."""
        outcomes = self._run(_QUIET_RPS * self._num_replicas, None)
        ttft = [outcome.first_at - outcome.submitted_at for outcome in outcomes if outcome.first_at is not None]
        return Slo(TTFT_FACTOR * float(np.median(ttft)), ITL_FACTOR * float(np.median([*map(self._itl, outcomes)])))

    def at(self, rate: float, slo: Slo) -> dict[str, Any]:
        """Rates, latencies and refusals at so many requests per second. Rates are of requests that were served before
        the last one arrived, latencies of those that were admitted, from when they were.
        """
        outcomes = self._run(rate, QueueLimits(max_wait_s=slo.ttft_s / 2) if self._bounded else None)
        span = len(outcomes) / rate
        served = [outcome for outcome in outcomes if outcome.ended_at is not None]
        ttft = [(outcome.first_at or inf) - outcome.submitted_at for outcome in served]
        is_good = [slo.is_met(wait_s, self._itl(outcome)) for wait_s, outcome in zip(ttft, served, strict=True)]
        in_time = [_WARM_UP * span < (outcome.ended_at or inf) <= span for outcome in served]
        seconds = (1 - _WARM_UP) * span
        return {
            "offered_rps": rate,
            "served_rps": sum(in_time) / seconds,
            "goodput_rps": sum(map(and_, is_good, in_time)) / seconds,
            "ttft_p50_s": float(np.percentile(ttft, 50)),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "refused_share": sum(bool(outcome.refused) for outcome in outcomes) / len(outcomes),
            "served_share": {tenant: _share(outcomes, tenant) for tenant in (HEAVY, LIGHT)},
            "retry_after": retry_after([(o.refused, o.submitted_at) for o in served if o.refused]),
        }

    def _run(self, rate: float, queue: QueueLimits | None) -> list[Outcome]:
        rng, at, outcomes = Random(self._seed), 0.0, list[Outcome]()
        requests = [replace(one, arrival_s=(at := at + rng.expovariate(rate))) for one in self._trace.requests]
        trace = replace(self._trace, requests=requests)
        setup = setup_of("warm_prefix", self._num_replicas, trace, costs=self._costs, seed=self._seed)
        late = LateBinding(needs_slot=queue is not None)
        simulate(trace, replace(setup, late=late, queue=queue, caller=caller_of, observe=outcomes.append))
        return outcomes

    def _itl(self, outcome: Outcome) -> float:
        output = self._trace.requests[outcome.number].output_tokens
        return ((outcome.ended_at or inf) - (outcome.first_at or 0.0)) / max(1, output - 1)


def retry_after(stories: Sequence[tuple[Sequence[tuple[float, float]], float]]) -> dict[str, float]:
    """How true it was, over clients that were refused (when, and what they were told, each time) and let in at last.

    ``error_p50``: of what the first answer said against the time until they were let in, as a share of that time;
    ``first_try`` is the share of those that were let in when they came back.
    """
    if not stories:
        return {"clients": 0}
    told = np.array([refused[0][1] for refused, _ in stories])
    took = np.array([let_in - refused[0][0] for refused, let_in in stories])
    errors = np.abs(told - took) / took
    return {
        "clients": len(stories),
        "error_p50": float(np.median(errors)),
        "error_p90": float(np.percentile(errors, 90)),
        "first_try": sum(len(refused) == 1 for refused, _ in stories) / len(stories),
        "told_p50_s": float(np.median(told)),
    }


def caller_of(number: int) -> Caller:
    """One request in eleven is the light tenant's."""
    return Caller(tenant=LIGHT if number % 11 == 0 else HEAVY, patience_s=PATIENCE_S)


def _share(outcomes: Sequence[Outcome], tenant: str) -> float:
    """Of a tenant's requests, those that were served."""
    own = [outcome for outcome in outcomes if caller_of(outcome.number).tenant == tenant]
    return sum(outcome.ended_at is not None for outcome in own) / max(1, len(own))
