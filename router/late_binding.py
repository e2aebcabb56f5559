"""Requests that wait in the router because every good replica is busy: shortest work first, aged."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .policy.base import Candidates, Ranking

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBinding:
    """When a request waits in the router, and who goes first.

    Bound early, it would stand in one replica's queue while another becomes free, and behind longer ones.
    """

    backlog_s: float = 0.4
    """It waits while the replica that is best for it has more than this to prefill. Busy ones become dearer for it
    with every second, so it takes a free one in the end.
    """
    aging: float = 0.003
    """A second of waiting outweighs so many seconds of work: nobody is overtaken for ever."""
    stall_s: float = 5.0
    """After so long without news of any request the first in line is bound whatever the backlog."""
    tries: int = 16
    """Requests looked at, from the first in line, whenever a replica may have become free."""
    in_turn: bool = True
    """See ``Binding``."""

    def is_free(self, candidates: Candidates, place: int) -> bool:
        """See ``Binding``."""
        return bool(candidates.backlog_s[place] <= self.backlog_s)

    def any_free(self, candidates: Candidates) -> bool:
        """See ``Binding``."""
        return bool(candidates.backlog_s.min() <= self.backlog_s)

    def work(self, candidates: Candidates, place: int, prompt_tokens: int) -> float:
        """Seconds of its own prefill where it would go now."""
        return float(candidates.prefill_s(candidates.uncached(prompt_tokens))[place])

    def after(self, waited_s: float, candidates: Candidates, ranking: Ranking) -> Ranking:
        """Others go first where it wants to go: what it waited is what it had better believe of busy replicas."""
        return ranking.dearer(candidates.backlog_s > self.backlog_s, waited_s)


@dataclass(slots=True, order=True)
class _Entry(Generic[T]):
    key: float
    number: int
    item: T = field(compare=False)
    gone: bool = field(default=False, compare=False)


class WaitingLine(Generic[T]):
    """A heap by ``work + aging * arrival``: a static key ages all alike. ``len`` counts who waits."""

    def __init__(self, aging: float) -> None:
        self._aging = aging
        self._heap: list[_Entry[T]] = []
        self._entries: dict[int, _Entry[T]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries.values())

    def put(self, item: T, work_s: float, arrival: float) -> None:
        """Line up."""
        entry = _Entry(work_s + self._aging * arrival, next(self._numbers), item)
        self._entries[id(item)] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, item: T) -> bool:
        """Leave the line, from anywhere; whether it stood there."""
        entry = self._entries.pop(id(item), None)
        if entry is not None:
            entry.gone = True
        return entry is not None

    def take(self, tries: int, ready: Callable[[T], bool]) -> Iterator[T]:
        """Those of the first ``tries`` that are ``ready``, taken out one by one."""
        passed: list[_Entry[T]] = []
        try:
            while self._heap and len(passed) < tries:
                entry = heapq.heappop(self._heap)
                if entry.gone:
                    continue
                if ready(entry.item):
                    del self._entries[id(entry.item)]
                    yield entry.item
                else:
                    passed.append(entry)
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)
