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


class ClusterState(Protocol):
    """What the API tells of the cluster. Answers come from memory, at once."""

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Every known replica."""
        ...

    def routing(self) -> RoutingStats:
        """What the router has decided so far."""
        ...
