"""Self-correction: what the index says of a replica counts for as much as it has proved true lately.

A replica says with each first token how much of the prompt it had cached. One that finds less than the index claimed
for it, again and again, is believed less, and asked for a snapshot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from ..cluster.ids import BlockHash, ReplicaId
from ..kv_store.hashing import TOKEN_BYTES
from ..kv_store.index import PrefixIndex
from ..kv_store.slots import Held, ReplicaSlots

LEARN = 0.2
"""Weight of the latest request: four in a row that find nothing bring the share below one half."""
BELIEVED = 0.9
"""From this share on claims count whole: blocks are evicted and events take their time everywhere."""
FORGIVEN = 0.99
RESYNC = 0.5
RESYNC_EVERY_S = 30.0
RECOVERY_S = 60.0
"""Who gets no requests any more cannot prove anything: doubts fade with this time constant."""


@dataclass(slots=True)
class _Record:
    share: float
    at: float
    resynced_at: float = float("-inf")


class Trust:
    """Shares of what was claimed of replicas that they had; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[ReplicaId, _Record] = {}

    def observe(self, replica: ReplicaId, claimed_tokens: int, actual_tokens: int) -> bool:
        """A request found ``actual_tokens`` where ``claimed_tokens`` (above 0) were claimed. True: resync it now."""
        found = min(1.0, actual_tokens / claimed_tokens)
        record = self._records.get(replica)
        if record is None and found >= 1.0:
            return False
        now = self._clock()
        record = self._records.setdefault(replica, _Record(1.0, now))
        share = self._share(record, now)
        record.share, record.at = share + LEARN * (found - share), now
        if record.share > FORGIVEN:
            del self._records[replica]
        if record.share >= RESYNC or now - record.resynced_at < RESYNC_EVERY_S:
            return False
        record.resynced_at = now
        return True

    def doubted(self) -> dict[ReplicaId, float]:
        """Who is not believed, with the share of each."""
        if not self._records:
            return {}
        now = self._clock()
        shares = {replica: self._share(record, now) for replica, record in self._records.items()}
        return {replica: share for replica, share in shares.items() if share < BELIEVED}

    def _share(self, record: _Record, now: float) -> float:
        return 1.0 - (1.0 - record.share) * exp((record.at - now) / RECOVERY_S)


class TrustedIndex:
    """``MatchingIndex`` over a router's index that discounts what is claimed of replicas in doubt."""

    def __init__(self, index: PrefixIndex, trust: Trust) -> None:
        self.trust = trust
        self._index = index
        self._last: tuple[BlockHash, int, bytes, Held] = (BlockHash(b""), 0, b"", [])

    @property
    def slots(self) -> ReplicaSlots:
        """See ``MatchingIndex``."""
        return self._index.slots

    def held(self, namespace: BlockHash, tokens: bytes, block_size: int) -> Held:
        """See ``MatchingIndex``."""
        held = self._index.held(namespace, tokens, block_size)
        self._last = namespace, block_size, tokens, held
        doubted = self.trust.doubted()
        return self._discounted(held, doubted) if doubted else held

    def claimed(self, replica: ReplicaId, namespace: BlockHash, tokens: bytes, block_size: int) -> int:
        """Whole blocks' tokens that the index claims ``replica`` will find: the prompt's last token is always computed.

        Cheap for the prompt that was looked up last.
        """
        known_namespace, known_size, known_tokens, held = self._last
        if known_tokens is not tokens or known_namespace != namespace or known_size != block_size:
            held = self._index.held(namespace, tokens, block_size)
        try:
            bit = 1 << self.slots.names.index(replica)
        except ValueError:
            return 0
        found = max((num_tokens for mask, num_tokens in held if mask & bit), default=0)
        return min(found, (len(tokens) // TOKEN_BYTES - 1) // block_size * block_size)

    def _discounted(self, held: Held, doubted: dict[ReplicaId, float]) -> Held:
        names = self.slots.names
        bits = [(1 << names.index(replica), share) for replica, share in doubted.items() if replica in names]
        everyone = sum(bit for bit, _ in bits)
        discounted: Held = []
        for mask, num_tokens in held:
            discounted += [(bit, int(num_tokens * share)) for bit, share in bits if mask & bit]
            if mask & ~everyone:
                discounted.append((mask & ~everyone, num_tokens))
        return discounted
