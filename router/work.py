"""What a router has to do, in the terms by which replicas are added and removed: ``cluster/demand.py``."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..cluster.demand import TTFT_WINDOW_S, Demand, ReplicaUse
from ..cluster.messages import Load

_MOST_FIRST_TOKENS = 128
_TOKEN_S = 1e-3
"""What a prompt token takes as long as no replica was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What a router has not seen finished. Seconds are those of one replica."""

    in_flight: int = 0
    """Requests that came and have not ended, those among them that wait."""
    line: int = 0
    """Requests that wait in the router."""
    line_tokens: int = 0
    """Prompt tokens that these want computed."""
    queued: int = 0
    """Requests that wait behind others in replicas."""
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of the replicas that there are."""

    fixed_s: float
    """Seconds of a prefill whatever its length."""
    token_s: float
    """Seconds for each token of it."""
    step_s: float
    """Seconds between two tokens of an only stream."""


class WorkMeter:
    """Counts what came to one router, and how long it took. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals = self._decoded = 0
        self._arrived_s = self._decoded_s = 0.0
        self._ttfts = deque[tuple[float, float, float]](maxlen=_MOST_FIRST_TOKENS)
        self._busy_at = clock()
        self._speed = Speed(fixed_s=0.0, token_s=_TOKEN_S, step_s=0.0)

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

    def demand(self, router: str, backlog: Backlog, speed: Speed | None, loads: Iterable[tuple[str, Load]]) -> Demand:
        """What is told of this router. ``speed`` None: there are no replicas, and what was known last counts."""
        now, loads = self._clock(), list(loads)
        if backlog.in_flight or any(load.running or load.waiting for _, load in loads):
            self._busy_at = now  # plain Serve handles do not tell what they have to do, but replicas do
        while self._ttfts and now - self._ttfts[0][0] > TTFT_WINDOW_S:
            self._ttfts.popleft()
        self._speed = speed = speed or self._speed
        return Demand(
            router=router,
            arrivals=self._arrivals,
            arrived_s=self._arrived_s,
            decoded=self._decoded,
            decoded_s=self._decoded_s,
            step_s=speed.step_s,
            waiting=backlog.line + backlog.queued,
            waiting_s=backlog.line * speed.fixed_s + backlog.line_tokens * speed.token_s + backlog.queued_s,
            in_flight=backlog.in_flight,
            idle_s=now - self._busy_at,
            ttfts=tuple((ttft, own) for _, ttft, own in self._ttfts),
            replicas=tuple((name, _use(load)) for name, load in loads),
        )


def _use(load: Load) -> ReplicaUse:
    return ReplicaUse(slots=load.running / max(1, load.max_num_seqs), kv=load.kv_usage)
