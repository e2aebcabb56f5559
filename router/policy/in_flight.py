"""What this router has sent and not seen finished: reservations, backlog, and prefixes that will soon be cached."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from ...cluster.ids import BlockHash, ReplicaId
from .prefix_counts import PrefixCounts

LINGER_S = 1.0
"""A prefix counts for this long after its first token: by then its events have come."""


class Prefix(NamedTuple):
    """A packed prompt (``hashing.pack_tokens``) in the namespace of a replica's cache."""

    namespace: BlockHash
    block_size: int
    tokens: bytes


class Phase(IntEnum):
    """How far a reserved request is."""

    PREFILL = 0
    DECODE = 1
    DONE = 2


@dataclass(slots=True, eq=False)
class Reservation:
    """A place taken on a replica. Only ``InFlight`` changes it."""

    replica: ReplicaId
    prefix: Prefix
    uncached_tokens: int
    prefill_s: float
    """Estimate for the uncached tokens."""
    began: float
    phase: Phase = Phase.PREFILL


@dataclass(slots=True)
class _Account:
    """One replica's reservations."""

    prefills: dict[int, Reservation] = field(default_factory=dict[int, Reservation])
    prefill_s: float = 0.0
    unfinished: int = 0
    last_first_token: float = float("-inf")


class InFlight:
    """Reservations of one router. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], linger_s: float = LINGER_S) -> None:
        self._clock = clock
        self._linger_s = linger_s
        self._prefixes = PrefixCounts()
        self._lingering: deque[tuple[float, Reservation]] = deque()
        self._accounts: dict[ReplicaId, _Account] = {}

    def reserve(self, replica: ReplicaId, prefix: Prefix, uncached_tokens: int, prefill_s: float) -> Reservation:
        """Count a request as sent. End it with ``release``, however it ends."""
        reservation = Reservation(replica, prefix, uncached_tokens, prefill_s, self._clock())
        account = self._accounts.setdefault(replica, _Account())
        account.prefills[id(reservation)] = reservation
        account.prefill_s += prefill_s
        account.unfinished += 1
        self._prefixes.add(*prefix, replica)
        return reservation

    def first_token(self, reservation: Reservation) -> None:
        """Its prefill is done; again, or after release, this does nothing."""
        if reservation.phase is not Phase.PREFILL:
            return
        now = self._clock()
        self._end_prefill(reservation).last_first_token = now
        reservation.phase = Phase.DECODE
        self._lingering.append((now + self._linger_s, reservation))

    def release(self, reservation: Reservation) -> None:
        """It finished, failed or was refused; again, this does nothing."""
        if reservation.phase is Phase.PREFILL:
            self._end_prefill(reservation)
            self._prefixes.remove(*reservation.prefix, reservation.replica)
        if reservation.phase is not Phase.DONE:
            reservation.phase = Phase.DONE
            self._close(reservation.replica)

    def match(self, prefix: Prefix) -> dict[ReplicaId, int]:
        """Leading tokens that each replica is computing, or has just computed, for earlier requests."""
        now = self._clock()
        while self._lingering and self._lingering[0][0] <= now:
            reservation = self._lingering.popleft()[1]
            self._prefixes.remove(*reservation.prefix, reservation.replica)
        return self._prefixes.match(*prefix)

    def backlog_s(self, replica: ReplicaId) -> float:
        """Seconds until the replica has prefilled what was sent: the estimates' sum less the time the head has had."""
        account = self._accounts.get(replica)
        if account is None or not account.prefills:
            return 0.0
        head = next(iter(account.prefills.values()))
        served = self._clock() - max(account.last_first_token, head.began)
        return max(0.0, account.prefill_s - min(served, head.prefill_s))

    def unfinished(self, replica: ReplicaId) -> int:
        """Requests sent there and not ended."""
        account = self._accounts.get(replica)
        return account.unfinished if account else 0

    def _end_prefill(self, reservation: Reservation) -> _Account:
        account = self._accounts[reservation.replica]
        del account.prefills[id(reservation)]
        # Sums of floats drift: an empty account starts from zero again.
        account.prefill_s = account.prefill_s - reservation.prefill_s if account.prefills else 0.0
        return account

    def _close(self, replica: ReplicaId) -> None:
        account = self._accounts[replica]
        account.unfinished -= 1
        if not account.unfinished:
            del self._accounts[replica]
