"""Places in the queue for requests that were refused: who comes back when told is let in.

Without them a ``Retry-After`` could not be true: by then others would have taken the room. A request is known again by
what it asks, for clients repeat it as it was.
"""

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from .policy.base import RoutingRequest
from .waiting_line import Claim

MAX_PROMISES = 4096
OUTCOMES = ("kept", "broken", "expired")
_EARLY = 0.05
"""Share of the wait that a client may come too early, and"""
_EARLY_S = 0.05
"""seconds beside it."""
_GRACE = 0.5
"""Share of the wait that a place is kept for who is late, and"""
_GRACE_S = 2.0
"""seconds beside it: ``Retry-After`` is rounded up to whole ones."""
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Promise:
    """Come back at ``due``, and be let in until ``expires``."""

    claim: Claim
    made: float
    due: float
    expires: float

    def is_due(self, now: float) -> bool:
        """Whether the client has waited as it was told."""
        return now >= self.due - _EARLY_S - _EARLY * (self.due - self.made)


class Promises:
    """The outstanding ones, at most ``MAX_PROMISES``: the oldest are forgotten first."""

    def __init__(self) -> None:
        self._promises: OrderedDict[bytes, Promise] = OrderedDict()
        self._expiries: list[tuple[float, bytes]] = []
        self._tokens: Counter[tuple[int, str]] = Counter()
        self._returning = 0.5
        """Share of those who come back in time."""
        self.kept = 0
        """Clients that came when told, and were let in."""
        self.broken = 0
        """Those that were sent away again."""
        self.expired = 0
        """Those that did not come."""

    def __len__(self) -> int:
        return len(self._promises)

    def counts(self) -> dict[str, int]:
        """What became of them."""
        return {"kept": self.kept, "broken": self.broken, "expired": self.expired}

    def make(self, key: bytes, claim: Claim, wait_s: float, now: float) -> None:
        """Keep a place for who comes back in ``wait_s`` seconds."""
        self._drop(key)
        promise = Promise(claim, now, now + wait_s, now + wait_s * (1 + _GRACE) + _GRACE_S)
        self._promises[key] = promise
        self._tokens[claim.priority, claim.tenant] += claim.tokens
        heapq.heappush(self._expiries, (promise.expires, key))
        if len(self._promises) > MAX_PROMISES:
            self._drop(next(iter(self._promises)))

    def find(self, key: bytes, now: float) -> Promise | None:
        """What this request was promised."""
        self._expire(now)
        return self._promises.get(key)

    def keep(self, key: bytes) -> None:
        """Its place is taken."""
        if self._drop(key) is not None:
            self.kept += 1
            self._returning += _WEIGHT * (1 - self._returning)

    def fail(self, key: bytes) -> None:
        """It came in time, and there is no room."""
        if self._drop(key) is not None:
            self.broken += 1
            self._returning += _WEIGHT * (1 - self._returning)

    def tokens(self, priority: float, tenant: str | None = None) -> float:
        """That are expected to come back with this priority or a more urgent one, of one tenant or of all."""
        return self._returning * sum(
            tokens for (other, name), tokens in self._tokens.items() if other <= priority and tenant in (None, name)
        )

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires, key = heapq.heappop(self._expiries)
            promise = self._promises.get(key)
            if promise is not None and promise.expires == expires:
                self._drop(key)
                self.expired += 1
                self._returning -= _WEIGHT * self._returning

    def _drop(self, key: bytes) -> Promise | None:
        promise = self._promises.pop(key, None)
        if promise is not None:
            place = promise.claim.priority, promise.claim.tenant
            self._tokens[place] -= promise.claim.tokens
            if not self._tokens[place]:
                del self._tokens[place]
        return promise


def key_of(request: RoutingRequest) -> bytes:
    """The same for a request that is sent again, for none else."""
    digest = blake2b(request.tokens or request.request_id.encode(), digest_size=16)
    digest.update(f"\0{request.tenant}\0{request.salt}\0{request.priority}\0{request.max_output}".encode())
    return digest.digest()
