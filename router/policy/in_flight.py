"""What this router has sent and not seen finished: reservations, backlog, and prefixes that will soon be cached."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from ...cluster.ids import ReplicaId
from ...kv_store.slots import Held, ReplicaSlots
from .base import Prefix
from .prefix_counts import PrefixCounts

LINGER_S = 1.0
"""A prefix counts for this long after its first token: by then its events have come."""


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
    prompt_tokens: int
    uncached_tokens: int
    prefill_s: float
    """Estimate for the uncached tokens."""
    began: float
    phase: Phase = Phase.PREFILL


@dataclass(slots=True)
class Account:
    """One replica's reservations. Only ``InFlight`` changes it."""

    prefills: dict[int, Reservation] = field(default_factory=dict[int, Reservation])
    """Those without a first token, oldest first."""
    sent_s: float = 0.0
    """Seconds these are expected to take."""
    sent_tokens: int = 0
    """Their uncached tokens."""
    unfinished: int = 0
    context_tokens: int = 0
    """Prompt tokens of all reservations."""
    head_s: float = 0.0
    """What the oldest prefill is expected to take."""
    head_since: float = float("-inf")
    """When it began."""


class InFlight:
    """Reservations of one router. ``clock`` gives monotonic seconds.

    ``on_change`` is told of every change of a replica's account.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        linger_s: float = LINGER_S,
        on_change: Callable[[ReplicaId, Account], None] = lambda replica, account: None,
    ) -> None:
        self._clock = clock
        self._linger_s = linger_s
        self._on_change = on_change
        self._prefixes = PrefixCounts()
        self._lingering: deque[tuple[float, Reservation]] = deque()
        self._accounts: dict[ReplicaId, Account] = {}

    @property
    def slots(self) -> ReplicaSlots:
        """Whose the bits of masks are."""
        return self._prefixes.slots

    def reserve(
        self, replica: ReplicaId, prefix: Prefix, prompt_tokens: int, uncached_tokens: int, prefill_s: float
    ) -> Reservation:
        """Count a request as sent. End it with ``release``, however it ends."""
        reservation = Reservation(replica, prefix, prompt_tokens, uncached_tokens, prefill_s, self._clock())
        account = self._accounts.setdefault(replica, Account())
        if not account.prefills:
            account.head_s, account.head_since = prefill_s, reservation.began
        account.prefills[id(reservation)] = reservation
        account.sent_s += prefill_s
        account.sent_tokens += uncached_tokens
        account.unfinished += 1
        account.context_tokens += prompt_tokens
        self._prefixes.add(*prefix, replica)
        self._on_change(replica, account)
        return reservation

    def first_token(self, reservation: Reservation) -> None:
        """Its prefill is done; again, or after release, this does nothing."""
        if reservation.phase is not Phase.PREFILL:
            return
        now = self._clock()
        reservation.phase = Phase.DECODE
        account = self._end_prefill(reservation)
        # What is next may have begun only when this one ended.
        account.head_since = now
        self._on_change(reservation.replica, account)
        self._lingering.append((now + self._linger_s, reservation))

    def release(self, reservation: Reservation) -> None:
        """It finished, failed or was refused; again, this does nothing."""
        if reservation.phase is Phase.DONE:
            return
        replica = reservation.replica
        if reservation.phase is Phase.PREFILL:
            account = self._end_prefill(reservation)
            self._prefixes.remove(*reservation.prefix, replica)
        else:
            account = self._accounts[replica]
        reservation.phase = Phase.DONE
        account.unfinished -= 1
        account.context_tokens -= reservation.prompt_tokens
        self._on_change(replica, account)
        if not account.unfinished:
            del self._accounts[replica]

    def account(self, replica: ReplicaId) -> Account:
        """What is known of a replica; an empty one if nothing is."""
        return self._accounts.get(replica) or Account()

    def match(self, prefix: Prefix) -> dict[ReplicaId, int]:
        """Leading tokens that each replica is computing, or has just computed, for earlier requests."""
        return self.slots.by_name(self.held(prefix))

    def held(self, prefix: Prefix) -> Held:
        """``match`` without looking at single replicas: sets of ``slots``."""
        now = self._clock()
        while self._lingering and self._lingering[0][0] <= now:
            reservation = self._lingering.popleft()[1]
            self._prefixes.remove(*reservation.prefix, reservation.replica)
        return self._prefixes.held(*prefix)

    def left(self, replica: ReplicaId) -> None:
        """The replica is gone; what it still has in flight goes on."""
        self._prefixes.forget(replica)

    def backlog_s(self, replica: ReplicaId) -> float:
        """Seconds until the replica has prefilled what was sent: the estimates' sum less the time the head has had."""
        account = self._accounts.get(replica)
        if account is None or not account.prefills:
            return 0.0
        return max(0.0, account.sent_s - min(self._clock() - account.head_since, account.head_s))

    def unfinished(self, replica: ReplicaId) -> int:
        """Requests sent there and not ended."""
        account = self._accounts.get(replica)
        return account.unfinished if account else 0

    def reserved(self) -> tuple[int, int]:
        """Requests sent anywhere and not ended, and the uncached tokens of those without a first token."""
        accounts = self._accounts.values()
        return sum(one.unfinished for one in accounts), sum(one.sent_tokens for one in accounts)

    def queued(self) -> tuple[int, int, float]:
        """Requests that were sent and have not ended; those of them whose prefill waits for another one on the same
        replica; and the seconds that these take.
        """
        accounts = self._accounts.values()
        queues = [account for account in accounts if len(account.prefills) > 1]
        waiting_s = sum(account.sent_s - account.head_s for account in queues)
        return sum(one.unfinished for one in accounts), sum(len(one.prefills) - 1 for one in queues), waiting_s

    def _end_prefill(self, reservation: Reservation) -> Account:
        account = self._accounts[reservation.replica]
        del account.prefills[id(reservation)]
        account.sent_tokens -= reservation.uncached_tokens
        head = next(iter(account.prefills.values()), None)
        if head is None:
            # Sums of floats drift: an empty account starts from zero again.
            account.sent_s = account.head_s = 0.0
        else:
            account.sent_s -= reservation.prefill_s
            account.head_s = head.prefill_s
            account.head_since = max(account.head_since, head.began)
        return account
