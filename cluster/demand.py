"""What a model is asked to do, as its routers tell it, and what follows for how many replicas it needs.

Work is counted in seconds that one replica is busy with it (replica-seconds), so that it means the same however many
replicas there are: what arrives in a second is a number of replicas.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

TTFT_WINDOW_S = 30.0
"""First tokens that are older say nothing of now."""
FORGET_S = 5.0
"""A router that was not heard for so long is gone, or cannot be reached: what it said does not count any more."""
WINDOW_S, _LONG_S = 30.0, 150.0
"""Rates are taken over the short window, means over the long one."""
_ENOUGH = 10
"""Fewer requests in the short window are no rate: what the long one tells counts if it is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUse:
    """What a replica says of itself: shares of its batch slots and of its KV memory that requests hold."""

    slots: float = 0.0
    kv: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one router has to do for one model. What is counted is counted since the router's start."""

    router: str
    arrivals: int = 0
    """Requests that came."""
    arrived_s: float = 0.0
    """Replica-seconds of prefill that they want, by prediction: what is cached takes none."""
    decoded: int = 0
    """Output tokens after the first one, of requests that ended."""
    decoded_s: float = 0.0
    """Seconds that these took."""
    step_s: float = 0.0
    """Seconds that a token takes on a replica that does nothing else; 0: no replica was heard of."""
    waiting: int = 0
    """Requests that wait here, or in a replica behind others of this router, for their prefill to begin."""
    waiting_s: float = 0.0
    """Replica-seconds of prefill that these want."""
    in_flight: int = 0
    """Requests that came and have not ended."""
    idle_s: float = 0.0
    """Seconds since there was one."""
    ttfts: tuple[tuple[float, float], ...] = ()
    """Of the latest first tokens, within ``TTFT_WINDOW_S``: seconds since the request came, and of these the seconds
    that its prefill was to take.
    """
    replicas: tuple[tuple[str, ReplicaUse], ...] = ()
    """Replicas that are known here, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All routers' demand together."""

    arriving: float = 0.0
    """Replicas that prefill alone keeps busy: replica-seconds that arrive in a second."""
    prefill_s: float = 0.0
    """Mean replica-seconds of a prompt."""
    waiting: int = 0
    waiting_s: float = 0.0
    in_flight: int = 0
    idle_s: float = 0.0
    """Seconds since any router had a request, those among them that fell silent since."""
    slots: float = 0.0
    """Replicas' worth of batch slots that are taken."""
    kv: float = 0.0
    """Replicas' worth of KV memory that is held."""
    itl_s: float = 0.0
    """Mean time between two tokens; 0: nothing was decoded."""
    step_s: float = 0.0
    """What it is on a replica that does nothing else."""
    ttfts: tuple[tuple[float, float], ...] = ()

    def late(self, slo_s: float) -> float:
        """Share of first tokens that came later than ``slo_s``, of prompts that need not take as long."""
        fair = [ttft for ttft, own in self.ttfts if own < slo_s]
        return sum(ttft > slo_s for ttft in fair) / len(fair) if fair else 0.0


@dataclass(frozen=True, slots=True)
class _Count:
    """What had been counted at a time."""

    at: float
    arrivals: float = 0.0
    arrived_s: float = 0.0
    decoded: float = 0.0
    decoded_s: float = 0.0

    def since(self, earlier: "_Count") -> "_Count":
        return _Count(
            self.at - earlier.at,
            self.arrivals - earlier.arrivals,
            self.arrived_s - earlier.arrived_s,
            self.decoded - earlier.decoded,
            self.decoded_s - earlier.decoded_s,
        )


class DemandMeter:
    """Puts together what routers tell. Times are seconds of one clock, whose ever."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, Demand]] = {}
        self._total = _Count(0.0)
        self._history: deque[_Count] = deque()
        self._busy_at = 0.0

    def hear(self, demand: Demand, now: float) -> None:
        """A router's word of ``now``. One that is new, or was started again, counts from here."""
        if not self._latest:  # of whom else there may be nobody knows yet when there was a request
            self._busy_at = now
        self._busy_at = max(self._busy_at, now - demand.idle_s)
        before = self._latest.get(demand.router, (now, demand))[1]
        if before.arrivals <= demand.arrivals and before.decoded <= demand.decoded:
            total = self._total
            self._total = _Count(
                now,
                total.arrivals + demand.arrivals - before.arrivals,
                total.arrived_s + demand.arrived_s - before.arrived_s,
                total.decoded + demand.decoded - before.decoded,
                total.decoded_s + demand.decoded_s - before.decoded_s,
            )
        self._latest[demand.router] = (now, demand)

    def figures(self, now: float) -> Figures | None:
        """What is known now; None: no router was heard lately."""
        self._latest = {name: word for name, word in self._latest.items() if now - word[0] <= FORGET_S}
        words = [demand for _, demand in self._latest.values()]
        if not words:
            self._history.clear()  # what comes after a silence has not come within a second
            return None
        recent, older = self._windows(now)
        uses = _uses(words)
        return Figures(
            arriving=_arriving(recent, older),
            prefill_s=older.arrived_s / older.arrivals if older.arrivals else 0.0,
            waiting=sum(word.waiting for word in words),
            waiting_s=sum(word.waiting_s for word in words),
            in_flight=sum(word.in_flight for word in words),
            idle_s=now - self._busy_at,
            slots=sum(use.slots for use in uses),
            kv=sum(use.kv for use in uses),
            itl_s=recent.decoded_s / recent.decoded if recent.decoded else 0.0,
            step_s=max(word.step_s for word in words),
            ttfts=tuple(pair for word in words for pair in word.ttfts),
        )

    def _windows(self, now: float) -> tuple[_Count, _Count]:
        """What came within the short and the long window, ``at`` being the seconds that they really last."""
        total, history = self._total, self._history
        count = _Count(now, total.arrivals, total.arrived_s, total.decoded, total.decoded_s)
        history.append(count)
        while len(history) > 2 and now - history[1].at >= _LONG_S:
            history.popleft()
        short = next(earlier for earlier in reversed(history) if now - earlier.at >= WINDOW_S or earlier is history[0])
        return count.since(short), count.since(history[0])


def _arriving(recent: _Count, older: _Count) -> float:
    rate = recent.arrived_s / recent.at if recent.at else 0.0
    return rate if recent.arrivals >= _ENOUGH or not older.at else min(rate, older.arrived_s / older.at)


def _uses(words: Iterable[Demand]) -> list[ReplicaUse]:
    """Of each replica what the router says that knows of the most: the others have older words."""
    found: dict[str, ReplicaUse] = {}
    for word in words:
        for name, use in word.replicas:
            known = found.get(name, use)
            found[name] = ReplicaUse(slots=max(known.slots, use.slots), kv=max(known.kv, use.kv))
    return list(found.values())
