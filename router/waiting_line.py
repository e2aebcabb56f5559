"""The line of requests that wait in the router: priority first, then tenants in turn, then the shortest work; all aged.

With one tenant and one priority, as usually, it is one heap.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeVar

from ..cluster.fair_share import FairShares

T = TypeVar("T")

PRIORITY_AGE_S = 30.0
"""Seconds of waiting that weigh as much as one step of priority, as in the engine."""


class Claim(NamedTuple):
    """What a request wants of the queue, and for whom."""

    tokens: int = 0
    """To compute before its first token."""
    priority: int = 0
    tenant: str = ""
    share: float = 1.0


NO_CLAIM = Claim()


@dataclass(slots=True, order=True)
class Entry(Generic[T]):
    """One that waits."""

    key: float
    number: int
    item: T = field(compare=False)
    claim: Claim = field(compare=False)
    arrival: float = field(compare=False)
    expires: float = field(compare=False)
    gone: bool = field(default=False, compare=False)


class _Queue(Generic[T]):
    """Those of one tenant with one priority."""

    def __init__(self, priority: int, tenant: str) -> None:
        self.priority = priority
        self.tenant = tenant
        self.tokens = 0
        self.entries: dict[int, Entry[T]] = {}
        """By the id of the item, oldest first."""
        self.heap: list[Entry[T]] = []

    def oldest(self, seen: set[int]) -> Entry[T] | None:
        """Of those that were not looked at."""
        return next((entry for number, entry in self.entries.items() if number not in seen), None)

    def pop(self, seen: set[int], popped: list[Entry[T]]) -> Entry[T] | None:
        """The next by work that was not looked at; what leaves the heap goes to ``popped``."""
        while self.heap:
            entry = heapq.heappop(self.heap)
            if entry.gone:
                continue
            popped.append(entry)
            if id(entry.item) not in seen:
                return entry
        return None


class WaitingLine(Generic[T]):
    """``len`` counts who waits, iteration goes over them.

    Of a queue the least ``work + aging * arrival`` goes first: a static key ages all alike. But who has waited for
    ``overdue_s`` goes first of all in its queue, oldest first.
    """

    def __init__(self, aging: float, overdue_s: float = inf) -> None:
        self.shares = FairShares()
        """Of the tenants that wait here."""
        self._aging = aging
        self._overdue_s = overdue_s
        self._queues: dict[tuple[int, str], _Queue[T]] = {}
        self._where: dict[int, _Queue[T]] = {}
        self._expiries: list[tuple[float, int, Entry[T]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for queue in self._queues.values() for entry in queue.entries.values())

    def put(self, item: T, work_s: float, arrival: float, claim: Claim = NO_CLAIM, expires: float = inf) -> None:
        """Line up."""
        place = claim.priority, claim.tenant
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _Queue(*place)
        entry = Entry(work_s + self._aging * arrival, next(self._numbers), item, claim, arrival, expires)
        queue.entries[id(item)] = entry
        queue.tokens += claim.tokens
        heapq.heappush(queue.heap, entry)
        self._where[id(item)] = queue
        if expires < inf:
            heapq.heappush(self._expiries, (expires, entry.number, entry))
        self.shares.enter(claim.tenant, claim.share)

    def discard(self, item: T) -> bool:
        """Leave the line, from anywhere; whether it stood there."""
        queue = self._where.pop(id(item), None)
        if queue is None:
            return False
        entry = queue.entries.pop(id(item))
        entry.gone = True
        queue.tokens -= entry.claim.tokens
        if not queue.entries:
            del self._queues[queue.priority, queue.tenant]
        self.shares.leave(queue.tenant)
        return True

    def expire(self, now: float) -> list[T]:
        """Those whose time is up; they have left."""
        expired: list[T] = []
        while self._expiries and (self._expiries[0][2].gone or self._expiries[0][0] <= now):
            item = heapq.heappop(self._expiries)[2].item
            if self.discard(item):
                expired.append(item)
        return expired

    def tokens(self, priority: float = inf, tenant: str | None = None) -> int:
        """That wait with this priority or a more urgent one, of one tenant or of all."""
        return sum(
            queue.tokens
            for queue in self._queues.values()
            if queue.priority <= priority and tenant in (None, queue.tenant)
        )

    def last(self, priority: int, tenant: str | None = None) -> Entry[T] | None:
        """The latest of the least urgent that are less urgent than ``priority``, of one tenant or of all."""
        queues = [q for q in self._queues.values() if q.priority > priority and tenant in (None, q.tenant)]
        if not queues:
            return None
        least = max(queue.priority for queue in queues)
        newest = (next(reversed(queue.entries.values())) for queue in queues if queue.priority == least)
        return max(newest, key=lambda entry: entry.number)

    def take(self, tries: int, ready: Callable[[T], bool], now: float = 0.0) -> Iterator[T]:
        """Those of the first ``tries`` that are ``ready``, taken out one by one."""
        seen, passes = set[int](), Counter[str]()
        popped: dict[tuple[int, str], list[Entry[T]]] = {}
        try:
            while len(seen) < tries and (entry := self._next(seen, passes, popped, now)) is not None:
                if ready(entry.item):
                    self.discard(entry.item)
                    yield entry.item
                else:
                    seen.add(id(entry.item))
                    passes[entry.claim.tenant] += 1
        finally:
            for place, entries in popped.items():
                for entry in entries:
                    if not entry.gone:
                        heapq.heappush(self._queues[place].heap, entry)

    def _next(
        self,
        seen: set[int],
        passes: Counter[str],
        popped: dict[tuple[int, str], list[Entry[T]]],
        now: float,
    ) -> Entry[T] | None:
        queues = [queue for queue in self._queues.values() if queue.oldest(seen) is not None]
        if not queues:
            return None
        urgent = min(queue.priority for queue in queues)
        first = [queue for queue in queues if queue.priority == urgent]
        if len(first) < len(queues):
            aged = min((entry for queue in queues if (entry := queue.oldest(seen))), key=_aged)
            if aged.claim.priority != urgent:
                return aged
        queue = min(first, key=lambda queue: (passes[queue.tenant], self.shares.served(queue.tenant)))
        oldest = queue.oldest(seen)
        if oldest is not None and now - oldest.arrival > self._overdue_s:
            return oldest
        return queue.pop(seen, popped.setdefault((queue.priority, queue.tenant), []))


def _aged(entry: Entry[T]) -> tuple[float, int]:
    return entry.arrival + PRIORITY_AGE_S * entry.claim.priority, entry.number
