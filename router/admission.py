"""Who may join the line of a router, and when those had better come back who may not.

The queue is bounded by what its tokens take, at the rate at which it is seen to empty. Whoever does not fit is refused
before anything is queued, with the time after which there will be room: what waits before it and the places promised to
others, over that rate; and that room is kept (``Promises``). A more urgent request pushes out waiting ones that are
less urgent, the latest first; so does one of a tenant that has less than its part of the queue with those of one that
has more.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Generic, NoReturn, Protocol, TypeVar

from ..cluster.drain_rate import DrainRate
from ..cluster.errors import DeadlineExceededError, OverloadedError
from .policy.base import RoutingRequest
from .promises import Promises, key_of
from .waiting_line import Claim, WaitingLine

REFUSALS = ("full", "pushed_out", "deadline", "expired")
"""Why a request gets no replica."""
_LEAST_WAIT_S = 0.1
_FREE = 0.5
"""Share of the queue up to which anybody gets in: promised places must not leave replicas without work."""
_STRETCH = 2.0
"""A promise is kept even if the queue is that many times as long as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait in one router; by default anything."""

    max_wait_s: float = inf
    """Seconds that the queue is predicted to take at most."""
    max_tokens: float = inf
    """Tokens to compute before the first token of all that waits."""
    max_requests: float = inf
    """For each replica."""
    timeout_s: float = inf
    """A request that has waited for so long is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a request that would have to wait may expect of the replicas."""

    guess_per_s: float
    """Tokens that all of them prefill in a second if they do nothing else."""
    replicas: int
    prefill_s: float
    """Seconds from the moment that it goes to the best one to its first token."""
    left_s: float = inf
    """Until its deadline."""


class Waiting(Protocol):
    """What stands in the line."""

    @property
    def request(self) -> RoutingRequest:
        """What it asks."""
        ...


T = TypeVar("T", bound=Waiting)


class Admission(Generic[T]):
    """Guards a line. ``refused`` counts by reason: ``full``, ``pushed_out``, ``deadline``, ``expired``."""

    def __init__(self, line: WaitingLine[T], limits: QueueLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self.rate = DrainRate()
        self.promises = Promises()
        self.refused: Counter[str] = Counter()
        self._line = line
        self._per_s = inf

    def admit(
        self, request: RoutingRequest, claim: Claim, prospect: Prospect, now: float
    ) -> list[tuple[T, OverloadedError]]:
        """Let a request join the line. Those that it pushes out have left it; each with what to tell it.

        Raises OverloadedError, and DeadlineExceededError when no replica would do it in time.
        """
        patience_s = prospect.left_s - prospect.prefill_s
        if patience_s <= 0:
            self.refused["deadline"] += 1
            times = f"its first token alone takes {prospect.prefill_s:.2g} s, and {prospect.left_s:.2g} s are left"
            raise DeadlineExceededError(f"the request cannot be done in time: {times}")
        self._per_s = self.rate.per_s(prospect.guess_per_s, now)
        most = self.limits.max_requests * prospect.replicas
        bound = min(self.limits.max_tokens, min(self.limits.max_wait_s, patience_s) * self._per_s)
        if bound == inf and len(self._line) < most:
            return []
        key = key_of(request)
        promise = self.promises.find(key, now)
        # Who comes too early is let in where everybody is.
        stretch = _STRETCH if promise is not None and promise.is_due(now) else _FREE
        if not len(self._line) or (promise is not None and self._ahead(claim, bound) <= stretch * bound):
            self.promises.keep(key)
            return self._push_out(claim, bound, most, now)
        if promise is not None and not promise.is_due(now):
            self._refuse(f"come back in {promise.due - now:.2f} s", promise.due - now)
        if promise is not None:
            self.promises.fail(key)
        if self._fits(claim, bound) and (len(self._line) < most or self._line.last(claim.priority) is not None):
            return self._push_out(claim, bound, most, now)
        victims = self._push_out_others(claim, bound, now)
        if not victims:
            wait_s = self._wait_s(claim, bound)
            self.promises.make(key, claim, wait_s, now)
            self._refuse(f"try again in {wait_s:.2f} s", wait_s)
        return victims

    def left(self) -> None:
        """Requests may have left the line."""
        if not len(self._line):
            self.rate.end(self._clock())

    def _ahead(self, claim: Claim, bound: float) -> float:
        """Tokens that wait as urgently, and its own; the largest request counts as a whole queue."""
        return self._line.tokens(claim.priority) + min(claim.tokens, bound)

    def _fits(self, claim: Claim, bound: float) -> bool:
        ahead = self._ahead(claim, bound)
        return ahead <= _FREE * bound or ahead + self.promises.tokens(claim.priority) <= bound

    def _wait_s(self, claim: Claim, bound: float) -> float:
        """Seconds until there is room: in the whole queue, or in its tenant's part of it."""
        line, rate = self._line, self._per_s * self.rate.left_for(claim.priority)
        part = line.shares.part(claim.tenant, claim.share)
        own = line.tokens(claim.priority, claim.tenant) + self.promises.tokens(claim.priority, claim.tenant)
        whole = self._ahead(claim, bound) + self.promises.tokens(claim.priority) - bound
        fair = own + min(claim.tokens, bound) - bound * part
        return max(_LEAST_WAIT_S, min(whole / rate, fair / (rate * part)))

    def _push_out(self, claim: Claim, bound: float, most: float, now: float) -> list[tuple[T, OverloadedError]]:
        """Those that are less urgent, while the queue is too long."""
        victims: list[tuple[T, OverloadedError]] = []
        while self._line.tokens() + claim.tokens > bound or len(self._line) >= most:
            last = self._line.last(claim.priority)
            if last is None:
                break
            victims.append(self._shed(last.item, last.claim, bound, now))
        return victims

    def _push_out_others(self, claim: Claim, bound: float, now: float) -> list[tuple[T, OverloadedError]]:
        """Those of tenants that have more than their part of the queue, for one that has less."""
        line, victims = self._line, list[tuple[T, OverloadedError]]()
        part = line.shares.part(claim.tenant, claim.share)
        if part == 1.0 or line.tokens(claim.priority, claim.tenant) + claim.tokens > bound * part:
            return victims
        theirs = bound if claim.tenant in line.shares else bound * (1 - part)
        while line.tokens() + claim.tokens > bound:
            excess, tenant = max((self._excess(name, theirs), name) for name in line.shares)
            last = line.last(claim.priority - 1, tenant)
            if excess <= 0 or last is None:
                break
            victims.append(self._shed(last.item, last.claim, bound, now))
            if not len(line):
                break
        return victims

    def _excess(self, tenant: str, bound: float) -> float:
        """Tokens that a tenant has waiting above its part of the queue."""
        return self._line.tokens(inf, tenant) - bound * self._line.shares.part_of(tenant)

    def _shed(self, item: T, claim: Claim, bound: float, now: float) -> tuple[T, OverloadedError]:
        self._line.discard(item)
        wait_s = self._wait_s(claim, bound)
        self.promises.make(key_of(item.request), claim, wait_s, now)
        self.refused["pushed_out"] += 1
        reason = "the request gave way to more urgent ones or to other tenants'"
        return item, OverloadedError(f"{reason}: try again in {wait_s:.2f} s", retry_after=wait_s)

    def _refuse(self, advice: str, wait_s: float) -> NoReturn:
        self.refused["full"] += 1
        waiting = self._line.tokens()
        raise OverloadedError(
            f"the queue is full: {len(self._line)} requests wait with {waiting} tokens,"
            f" which take {waiting / self._per_s:.2f} s; {advice}",
            retry_after=wait_s,
        )
