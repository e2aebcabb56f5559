"""What the API and its metrics tell of the cluster, as a protocol that the dispatcher's membership implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ...cluster.messages import Load, ReplicaInfo


class ReplicaState(str, Enum):
    """What a replica may be given."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica as this ingress sees it."""

    info: ReplicaInfo
    state: ReplicaState
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Counts since start, of this ingress."""

    decisions: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """(policy, reason) to requests routed."""
    predicted_hit_tokens: int = 0
    """Prompt tokens that the prefix index expected in the chosen replica's cache."""
    actual_hit_tokens: int = 0
    """Prompt tokens that the replica found there."""
    best_hit_tokens: int = 0
    """Prompt tokens that the warmest replica would have had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """The metadata store as this ingress sees it, and what it learned from it."""

    store: str = "embedded"
    """Where it is, without secrets."""
    fault: str = ""
    """Why it cannot be read now, while routing goes on with what is known; empty: it can."""
    index_blocks: int = 0
    """Distinct blocks that the prefix index knows."""
    gaps: int = 0
    """Batches that did not follow what was known, since start; snapshots mend these."""
    skipped: int = 0
    """Batches that could not be read, since start."""
    conflicts: int = 0
    """Batches that contradicted what was known of equal tokens or hashes, since start; that part is left out."""


class ClusterState(Protocol):
    """What the API tells of the cluster. Answers come from memory, at once."""

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Every known replica."""
        ...

    def routing(self) -> RoutingStats:
        """What the router has decided so far."""
        ...

    def store(self) -> StoreStatus:
        """The metadata store."""
        ...
