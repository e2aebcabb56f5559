"""A day's traffic of several tenants: it rises and falls with the hours, and comes in bursts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from .generators import AGENT, CHAT, BlockIds, Shape, conversations
from .trace import Trace, TraceRequest

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who sends sessions of one shape."""

    shape: Shape
    share: float
    """Of all sessions."""
    peak_hour: float
    night: float
    """Sessions at the quietest hour, over those at the busiest one."""
    bursts: float
    """In a day, on average."""
    burst: float
    """How many times as many sessions begin in a burst."""
    burst_s: float
    """Its median length."""


DOCUMENTS = Shape(
    system_prompts=8,
    system_tokens=1024,
    first_tokens=5000,
    turn_tokens=60,
    output_tokens=180,
    spread=0.7,
    turns=3.0,
    pause_s=40.0,
)
"""A long document with each session, and a few questions about it."""

TENANTS = (
    Tenant(shape=CHAT, share=0.5, peak_hour=20.0, night=0.1, bursts=3.0, burst=3.0, burst_s=600.0),
    Tenant(shape=AGENT, share=0.3, peak_hour=14.0, night=0.03, bursts=6.0, burst=4.0, burst_s=300.0),
    Tenant(shape=DOCUMENTS, share=0.2, peak_hour=11.0, night=0.02, bursts=2.0, burst=3.0, burst_s=900.0),
)
"""People at home in the evening, programs that work by day, and an office."""


def day(sessions: int, seed: int, *, hours: float = 24.0, begin: float = 0.0) -> Trace:
    """About ``sessions`` in a whole day, of which ``hours`` from hour ``begin`` on are taken."""
    rng, ids = Random(seed), BlockIds()
    requests: list[TraceRequest] = []
    first, last = begin * 3600.0, (begin + hours) * 3600.0
    for tenant in TENANTS:
        begins = _begins(tenant, sessions * tenant.share, rng)
        requests += conversations(tenant.shape, rng, ids, (at - first for at in begins if first <= at < last))
    return Trace("day", sorted(requests, key=lambda request: request.arrival_s))


def _begins(tenant: Tenant, sessions: float, rng: Random) -> Iterator[float]:
    """Seconds of a day at which sessions begin: a Poisson process that is thinned to the hour's rate."""
    bursts = [
        (rng.uniform(0.0, DAY_S), rng.lognormvariate(math.log(tenant.burst_s), 0.5))
        for _ in range(_poisson(tenant.bursts, rng))
    ]
    mean = (1 + tenant.night) / 2
    most = sessions / DAY_S / mean * tenant.burst
    at = rng.expovariate(most)
    while at < DAY_S:
        if rng.random() < _rate(tenant, at, bursts) / tenant.burst:
            yield at
        at += rng.expovariate(most)


def _rate(tenant: Tenant, at: float, bursts: list[tuple[float, float]]) -> float:
    """Sessions that begin at that time, over those of the busiest hour."""
    wave = (1 + math.cos(2 * math.pi * (at / 3600.0 - tenant.peak_hour) / 24)) / 2
    usual = tenant.night + (1 - tenant.night) * wave
    return usual * (tenant.burst if any(begin <= at < begin + length for begin, length in bursts) else 1.0)


def _poisson(mean: float, rng: Random) -> int:
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1.0)
    return count
