"""What routers tell each other of the requests that they have in flight, so that several do not herd.

A word carries absolute numbers for each replica that changed, so a lost one does no lasting harm, and fingerprints of
the prompts just sent: hashes of their first 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, ... blocks. With those another router sees
that a prefix is being computed somewhere, without the prompt itself having travelled.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, cast

import msgpack

from ..cluster.ids import ReplicaId
from ..kv_store.hashing import TOKEN_BYTES
from .policy.base import Prefix
from .policy.in_flight import LINGER_S, Account, Reservation
from .recent import Figures

SILENT_S = 3.0
"""What a router told counts no longer once it has been silent for this long."""
_DIGEST_BYTES = 8
_MOST_FRESH = 4096
_VERSION = 1


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What other routers have in flight to one replica."""

    unfinished: int = 0
    context_tokens: int = 0
    sent_tokens: int = 0
    backlog_s: float = 0.0

    def __add__(self, other: "PeerLoad") -> "PeerLoad":
        return PeerLoad(
            self.unfinished + other.unfinished,
            self.context_tokens + other.context_tokens,
            self.sent_tokens + other.sent_tokens,
            self.backlog_s + other.backlog_s,
        )


@dataclass(slots=True)
class _Peer:
    heard_at: float
    loads: dict[ReplicaId, PeerLoad] = field(default_factory=dict[ReplicaId, PeerLoad])
    figures: Figures = field(default_factory=Figures)


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What is known of another router."""

    name: str
    in_flight: int
    """Sequences that it has in replicas."""
    silent_s: float
    """Seconds since it was heard."""
    figures: Figures


class Peers:
    """One router's side: what it has to tell, and what the others told. ``clock`` gives monotonic seconds.

    ``on_change`` is told of replicas for which others have more or less in flight than before.
    """

    def __init__(
        self, name: str, clock: Callable[[], float], on_change: Callable[[ReplicaId], None] = lambda replica: None
    ) -> None:
        self.name = name
        self.on_news: Callable[[], None] = lambda: None
        """Called when there is something to tell and somebody to tell it to."""
        self.figures: Callable[[], Figures] = Figures
        """What this router has to tell of the last minute; it is told with ``everything``."""
        self._clock = clock
        self._on_change = on_change
        self._accounts: dict[ReplicaId, Account] = {}
        self._changed: set[ReplicaId] = set()
        self._fresh: deque[Reservation] = deque(maxlen=_MOST_FRESH)
        self._peers: dict[str, _Peer] = {}
        self._totals: dict[ReplicaId, tuple[float, PeerLoad]] = {}
        self._prefixes: dict[bytes, dict[ReplicaId, float]] = {}
        self._fading: deque[tuple[float, ReplicaId, bytes]] = deque()

    def note(self, replica: ReplicaId, account: Account) -> None:
        """What this router has in flight to a replica has changed."""
        if account.unfinished:
            self._accounts[replica] = account
        else:
            self._accounts.pop(replica, None)
        self._changed.add(replica)
        if self._peers:
            self.on_news()

    def reserved(self, reservation: Reservation) -> None:
        """A prompt of this router is on its way to a replica."""
        if self._peers:
            self._fresh.append(reservation)

    def word(self, *, everything: bool = False) -> bytes:
        """What changed since the last word, or all there is: the others then forget what is not in it."""
        replicas = self._accounts if everything else self._changed
        loads = {replica: self._own(replica) for replica in replicas}
        fresh = [_fresh_to_wire(reservation) for reservation in self._fresh]
        self._changed.clear()
        self._fresh.clear()
        told = [_VERSION, self.name, everything, loads, fresh, *([self.figures().to_wire()] if everything else [])]
        return cast(bytes, msgpack.packb(told))

    def hear(self, word: bytes) -> None:
        """Take in a word; one's own changes nothing. Raises ValueError for what is none."""
        try:
            version, name, everything, loads, fresh, *more = cast(
                "list[Any]", msgpack.unpackb(word, strict_map_key=False)
            )
            if version != _VERSION or not isinstance(name, str):
                raise ValueError(f"version must be {_VERSION}, got {version!r:.40}")
            heard = {ReplicaId(str(replica)): _load_from_wire(load) for replica, load in loads.items()}
            prefixes = [_fresh_from_wire(*reservation) for reservation in fresh]
            figures = Figures.from_wire(more[0]) if more else None
        except (ValueError, TypeError, AttributeError, OverflowError, msgpack.UnpackException) as error:
            raise ValueError(f"not a word of a router: {error}"[:200]) from error
        if name != self.name:
            peer = self._take(name, heard, everything=bool(everything))
            peer.figures = figures or peer.figures
            for prefix in prefixes:
                self._remember(*prefix)

    def expire(self) -> None:
        """Forget who has been silent, and prefixes that must be in the caches by now. Call it about once a second."""
        now = self._clock()
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at > SILENT_S:
                del self._peers[name]
                self._sum(peer.loads)
        while self._fading and self._fading[0][0] <= now:
            _, replica, marks = self._fading.popleft()
            self._forget(replica, marks, now)

    def with_theirs(self, replica: ReplicaId, account: Account) -> Account:
        """A replica's account with what other routers have there."""
        told_at, load = self._totals.get(replica, (0.0, None))
        if load is None:
            return account
        # One prefill at a time ages: this router's own, or what the others told.
        own_head = bool(account.prefills)
        return replace(
            account,
            sent_s=account.sent_s + load.backlog_s,
            sent_tokens=account.sent_tokens + load.sent_tokens,
            unfinished=account.unfinished + load.unfinished,
            context_tokens=account.context_tokens + load.context_tokens,
            head_s=account.head_s if own_head else load.backlog_s,
            head_since=account.head_since if own_head else told_at,
        )

    def match(self, prefix: Prefix) -> dict[ReplicaId, int]:
        """Leading tokens that replicas are computing for other routers; at least, for lengths are coarse."""
        found: dict[ReplicaId, int] = {}
        if not self._prefixes:
            return found
        now = self._clock()
        for num_blocks, mark in fingerprint(prefix):
            holders = self._prefixes.get(mark)
            if holders is None:
                break
            found.update((name, num_blocks * prefix.block_size) for name, until in holders.items() if until > now)
        return found

    def _own(self, replica: ReplicaId) -> tuple[int, int, int, float]:
        account = self._accounts.get(replica) or Account()
        served = min(self._clock() - account.head_since, account.head_s)
        return account.unfinished, account.context_tokens, account.sent_tokens, max(0.0, account.sent_s - served)

    def others(self) -> list[PeerStatus]:
        """The routers that are heard, by name."""
        now = self._clock()
        return [
            PeerStatus(name, sum(load.unfinished for load in peer.loads.values()), now - peer.heard_at, peer.figures)
            for name, peer in sorted(self._peers.items())
        ]

    def _take(self, name: str, heard: dict[ReplicaId, PeerLoad], *, everything: bool) -> _Peer:
        peer = self._peers.setdefault(name, _Peer(0.0))
        peer.heard_at = self._clock()
        changed = set(heard)
        if everything:
            changed |= peer.loads.keys()
            peer.loads.clear()
        peer.loads.update(heard)
        self._sum(changed)
        return peer

    def _sum(self, replicas: "set[ReplicaId] | dict[ReplicaId, PeerLoad]") -> None:
        now = self._clock()
        for replica in list(replicas):
            total = sum((peer.loads[replica] for peer in self._peers.values() if replica in peer.loads), PeerLoad())
            if total.unfinished:
                self._totals[replica] = (now, total)
            else:
                self._totals.pop(replica, None)
            self._on_change(replica)

    def _remember(self, replica: ReplicaId, lasts_s: float, marks: bytes) -> None:
        until = self._clock() + min(max(0.0, lasts_s), 60.0) + LINGER_S
        for at in range(0, len(marks), _DIGEST_BYTES):
            holders = self._prefixes.setdefault(marks[at : at + _DIGEST_BYTES], {})
            holders[replica] = max(until, holders.get(replica, 0.0))
        self._fading.append((until, replica, marks))

    def _forget(self, replica: ReplicaId, marks: bytes, now: float) -> None:
        for at in range(0, len(marks), _DIGEST_BYTES):
            mark = marks[at : at + _DIGEST_BYTES]
            holders = self._prefixes.get(mark, {})
            if holders.get(replica, now) <= now:
                holders.pop(replica, None)
            if not holders:
                self._prefixes.pop(mark, None)


def fingerprint(prefix: Prefix) -> Iterator[tuple[int, bytes]]:
    """(blocks, hash of the prompt's beginning of that length) for growing lengths, four to each doubling."""
    step = prefix.block_size * TOKEN_BYTES
    digest = blake2b(digest_size=_DIGEST_BYTES, key=prefix.namespace, salt=prefix.block_size.to_bytes(16, "little"))
    done, stride, blocks = 0, 1, 1
    while blocks * step <= len(prefix.tokens):
        digest.update(prefix.tokens[done : blocks * step])
        done = blocks * step
        yield blocks, digest.digest()
        if blocks == 8 * stride:
            stride *= 2
        blocks += stride


def _fresh_to_wire(reservation: Reservation) -> tuple[str, float, bytes]:
    return reservation.replica, reservation.prefill_s, b"".join(mark for _, mark in fingerprint(reservation.prefix))


def _fresh_from_wire(replica: Any, lasts_s: Any, marks: Any) -> tuple[ReplicaId, float, bytes]:
    if not isinstance(marks, bytes) or math.isnan(lasts_s):
        raise ValueError(f"no fingerprints of a prompt: {marks!r:.40}, {lasts_s!r:.40}")
    return ReplicaId(str(replica)), float(lasts_s), marks


def _load_from_wire(wire: Any) -> PeerLoad:
    unfinished, context_tokens, sent_tokens, backlog_s = wire
    load = PeerLoad(int(unfinished), int(context_tokens), int(sent_tokens), float(backlog_s))
    counts = load.unfinished, load.context_tokens, load.sent_tokens
    if not (all(0 <= count < 2**63 for count in counts) and 0 <= load.backlog_s < 1e6):
        raise ValueError(f"a load must not be {load}")
    return load
