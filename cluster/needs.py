"""How many replicas each signal of a model's demand needs, whatever their number is now.

Figures are replica-seconds and replicas' worth (``demand.py``), so that a need does not fall because replicas came.
"""

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

from .autoscaling_config import AutoscalingConfig
from .demand import Figures

LATE_SHARE = 0.1
"""First tokens that may be later than their SLO."""
MOST_BUSY = 0.7
"""Share of a replica's time that prefill may take: decoding goes on beside it, and work comes in bursts."""
MOST_SLOTS = 0.9
"""Share of the batch slots that may be taken."""
_DRAIN_S = 30.0
"""What still waits when a new replica is up is to be done in so many seconds."""
_SPREAD = 1.5
"""Prompts wait by that factor longer than if their lengths were exponential."""
_LEAST_FIRST_TOKENS = 10
"""Fewer say nothing of their share that was late."""
_STEADY = 1e-6


class Need(NamedTuple):
    """So many replicas are needed, by one ``signal``, which is a word."""

    replicas: float
    signal: str
    reason: str


class Fleet(NamedTuple):
    """The replicas that a need is of."""

    ready: int
    starting: int
    start_s: float
    """What a replica needs to start."""
    ready_in_s: float
    """Until those that are starting should be up."""
    served: int
    """Replicas that were ready throughout the latest seconds, which is what times of tokens were measured with."""


NOTHING = Need(0.0, "idle", "nothing is asked")


def lasting(config: AutoscalingConfig, figures: Figures, fleet: Fleet) -> Iterator[Need]:
    """What goes on however many replicas there are."""
    if figures.arriving > _STEADY:
        yield _arriving(config, figures)
    if figures.kv > _STEADY:
        replicas = figures.kv / config.max_kv_usage
        yield Need(replicas, "kv", f"requests hold {figures.kv:.2f} replicas' KV memory")
    if figures.slots > _STEADY:
        yield Need(figures.slots / MOST_SLOTS, "slots", f"requests take {figures.slots:.2f} replicas' batch slots")
    slo, alone = config.itl_slo, figures.step_s
    if 0 < alone < slo and figures.itl_s > alone and fleet.served:
        # What a token takes beyond a lone stream's time grows with the requests on its replica.
        replicas = fleet.served * (figures.itl_s - alone) / (slo - alone)
        yield Need(replicas, "itl", f"tokens are {figures.itl_s * 1e3:.0f} ms apart; the SLO is {slo * 1e3:.0f} ms")


def passing(config: AutoscalingConfig, figures: Figures, fleet: Fleet) -> Iterator[Need]:
    """What more replicas would end: requests that wait, and first tokens that are late."""
    if figures.waiting and figures.waiting_s > config.target_queue_wait * max(1, fleet.ready):
        yield _waiting(figures, fleet)
    if config.ttft_slo and len(figures.ttfts) >= _LEAST_FIRST_TOKENS:
        late = figures.late(config.ttft_slo)
        if late > LATE_SHARE:
            reason = f"{late:.0%} of the latest {len(figures.ttfts)} first tokens took over {config.ttft_slo:g} s"
            yield Need(fleet.served * (1 + late - LATE_SHARE), "ttft", reason)


def replicas_for(busy: float, mean_s: float, wait_s: float) -> float:
    """Replicas with which requests of ``mean_s`` that keep ``busy`` of them at work wait for ``wait_s`` at most.

    Mean wait in a queue before n servers as Sakasegawa (1977) approximates it, each at most ``MOST_BUSY``.
    """
    low, high = busy / MOST_BUSY, busy / MOST_BUSY
    while _mean_wait_s(busy, high, mean_s) > wait_s:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _mean_wait_s(busy, middle, mean_s) <= wait_s else (middle, high)
    return high


def _mean_wait_s(busy: float, replicas: float, mean_s: float) -> float:
    share = busy / replicas
    return _SPREAD * mean_s * share ** (sqrt(2 * (replicas + 1)) - 1) / (replicas * (1 - share))


def _arriving(config: AutoscalingConfig, figures: Figures) -> Need:
    replicas = replicas_for(figures.arriving, figures.prefill_s, config.target_queue_wait)
    return Need(replicas, "arriving", f"prefill that keeps {figures.arriving:.2f} replicas busy arrives")


def _waiting(figures: Figures, fleet: Fleet) -> Need:
    """What is left of the queue when a replica that is started now is up: shorter queues are gone by then."""
    horizon = fleet.start_s
    done = fleet.ready * horizon + fleet.starting * max(0.0, horizon - fleet.ready_in_s)
    left = max(0.0, figures.waiting_s + figures.arriving * horizon - done)
    most = fleet.ready + fleet.starting + figures.waiting
    reason = f"{figures.waiting} requests wait with {figures.waiting_s:.1f} s of prefill"
    if left:
        reason += f", {left:.1f} s of which a new replica would still find"
    return Need(min(most, figures.arriving + left / _DRAIN_S), "waiting", reason)
