"""What replicas find in their caches without having told of it: somebody whose events do not come is not noticed
otherwise, for what a router does not know it does not claim.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..cluster.ids import ReplicaId
from .policy.base import Prefix
from .policy.in_flight import LINGER_S

IN_A_ROW = 4
"""Finds that nobody heard of, one after the other, before a replica is asked: single ones may have been evicted."""
ASK_EVERY_S = 30.0
_MOST_PENDING = 256


@dataclass(frozen=True, slots=True)
class _Find:
    due: float
    replica: ReplicaId
    prefix: Prefix
    num_tokens: int


class Unheard:
    """Finds that the index did not know of, looked up again once their events must have come.

    ``clock`` gives monotonic seconds; ``claimed`` tells how many tokens of a prompt the index claims of a replica.
    """

    def __init__(self, clock: Callable[[], float], claimed: Callable[[ReplicaId, Prefix], int]) -> None:
        self._clock = clock
        self._claimed = claimed
        self._pending: deque[_Find] = deque(maxlen=_MOST_PENDING)
        self._in_a_row: Counter[ReplicaId] = Counter()
        self._asked: dict[ReplicaId, float] = {}

    def found(self, replica: ReplicaId, prefix: Prefix, cached_tokens: int) -> None:
        """A replica had so many prompt tokens cached."""
        num_tokens = cached_tokens // prefix.block_size * prefix.block_size
        if num_tokens and num_tokens > self._claimed(replica, prefix):
            self._pending.append(_Find(self._clock() + LINGER_S, replica, prefix, num_tokens))

    def silent(self) -> list[ReplicaId]:
        """Who has found things again and again and told of none: ask these what they hold."""
        return [replica for replica in self._judged() if self._may_ask(replica)]

    def _judged(self) -> Iterator[ReplicaId]:
        now = self._clock()
        while self._pending and self._pending[0].due <= now:
            find = self._pending.popleft()
            if find.num_tokens <= self._claimed(find.replica, find.prefix):
                del self._in_a_row[find.replica]
                continue
            self._in_a_row[find.replica] += 1
            if self._in_a_row[find.replica] >= IN_A_ROW:
                yield find.replica

    def _may_ask(self, replica: ReplicaId) -> bool:
        now = self._clock()
        if now - self._asked.get(replica, float("-inf")) < ASK_EVERY_S:
            return False
        self._asked = {name: at for name, at in self._asked.items() if now - at < ASK_EVERY_S} | {replica: now}
        del self._in_a_row[replica]
        return True
