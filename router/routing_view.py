"""What a policy chooses from: replicas with what they have cached, how busy they are and how fast."""

from collections.abc import Iterable
from typing import Protocol

from ..cluster.ids import BlockHash, ReplicaId
from ..cluster.messages import Load, ReplicaInfo
from ..kv_store.hashing import salted
from ..kv_store.index import PrefixIndex
from .policy.base import Candidate
from .policy.in_flight import InFlight, Prefix
from .policy.rates import ReplicaRates


class KnownReplica(Protocol):
    """A replica, its latest word and its speed."""

    @property
    def info(self) -> ReplicaInfo:
        """What it announced."""
        ...

    @property
    def load(self) -> Load:
        """What it said last."""
        ...

    @property
    def rates(self) -> ReplicaRates:
        """What was learned of it."""
        ...


def prefix_of(info: ReplicaInfo, tokens: bytes, salt: str) -> Prefix:
    """A packed prompt where that replica would cache it."""
    return Prefix(salted(BlockHash(info.kv_namespace), salt), info.block_size, tokens)


class RoutingView:
    """Joins the prefix index with what this router has in flight."""

    def __init__(self, index: PrefixIndex, in_flight: InFlight) -> None:
        self.index = index
        self.in_flight = in_flight

    def candidates(self, tokens: bytes, salt: str, replicas: Iterable[KnownReplica]) -> list[Candidate]:
        """One for each replica; ``tokens`` is the packed prompt, ``salt`` its tenant's."""
        cached: dict[tuple[bytes, int], dict[ReplicaId, int]] = {}
        candidates: list[Candidate] = []
        for replica in replicas:
            info = replica.info
            key = (info.kv_namespace, info.block_size)
            if key not in cached:
                cached[key] = self._cached(prefix_of(info, tokens, salt))
            candidates.append(self._candidate(replica, cached[key].get(info.replica, 0)))
        return candidates

    def _cached(self, prefix: Prefix) -> dict[ReplicaId, int]:
        held = self.index.match(prefix.namespace, prefix.tokens, prefix.block_size)
        for replica, tokens in self.in_flight.match(prefix).items():
            if tokens > held.get(replica, 0):
                held[replica] = tokens
        return held

    def _candidate(self, replica: KnownReplica, cached_tokens: int) -> Candidate:
        info, rates = replica.info, replica.rates
        return Candidate(
            info.replica,
            cached_tokens,
            replica.load,
            self.in_flight.unfinished(info.replica),
            self.in_flight.backlog_s(info.replica),
            rates.prefill_tokens_per_s,
            rates.decode_step_s,
            max(1, info.kv_total_blocks * info.block_size),
        )
