"""What a router has to do, in the terms by which replicas are added and removed: ``cluster/demand.py``."""

from collections import deque
from collections.abc import Callable

from ..cluster.demand import TTFT_WINDOW_S, Demand, ReplicaUse
from ..cluster.messages import Load

_MOST_FIRST_TOKENS = 128


class WorkMeter:
    """Counts what came to one router, and how long it took. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals = self._decoded = 0
        self._arrived_s = self._decoded_s = 0.0
        self._ttfts = deque[tuple[float, float, float]](maxlen=_MOST_FIRST_TOKENS)
        self._busy_at = clock()

    def arrived(self, prefill_s: float) -> None:
        """A request came whose prefill is expected to take so many seconds on the replica that is best for it."""
        self._arrivals += 1
        self._arrived_s += prefill_s
        self._busy_at = self._clock()

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        """A request had its first token ``ttft_s`` after it came; its prefill was expected to take ``prefill_s``."""
        self._ttfts.append((self._clock(), ttft_s, prefill_s))

    def decoded(self, tokens: int, seconds: float) -> None:
        """So many tokens of an output came in so many seconds."""
        self._decoded += tokens
        self._decoded_s += seconds

    def demand(
        self,
        router: str,
        *,
        waiting: tuple[int, float],
        in_flight: int,
        step_s: float,
        replicas: tuple[tuple[str, ReplicaUse], ...],
    ) -> Demand:
        """What is told of this router; see ``Demand``. ``waiting``: requests, and seconds of prefill."""
        now = self._clock()
        if in_flight:
            self._busy_at = now
        while self._ttfts and now - self._ttfts[0][0] > TTFT_WINDOW_S:
            self._ttfts.popleft()
        return Demand(
            router=router,
            arrivals=self._arrivals,
            arrived_s=self._arrived_s,
            decoded=self._decoded,
            decoded_s=self._decoded_s,
            step_s=step_s,
            waiting=waiting[0],
            waiting_s=waiting[1],
            in_flight=in_flight,
            idle_s=now - self._busy_at,
            ttfts=tuple((ttft, own) for _, ttft, own in self._ttfts),
            replicas=replicas,
        )


def use_of(load: Load) -> ReplicaUse:
    """What a replica's word says of its room."""
    return ReplicaUse(slots=load.running / max(1, load.max_num_seqs), kv=load.kv_usage)
