"""What the API and its metrics tell of the cluster, as a protocol that the dispatcher's membership implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ...cluster.engine_counts import EngineCounts
from ...cluster.histogram import HistogramCounts, merged
from ...cluster.ids import ReplicaId
from ...cluster.messages import Load, ReplicaInfo
from ...cluster.scaling_status import ScalingStatus
from ...kv_store.prefix_tree import PrefixNode
from ..recent import Figures

DECISION_S = (5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
"""Bounds of the histogram of the time that a choice takes, in seconds."""
WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Bounds of the histogram of the time that requests wait in the router, in seconds."""
LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds of the histogram of the time that a replica's events take to the index, in seconds."""


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
    counts: EngineCounts = field(default_factory=EngineCounts)


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
    colder_choices: int = 0
    """Requests that went to another replica than the warmest."""
    decision_s: HistogramCounts = field(default_factory=lambda: merged(DECISION_S, ()))
    """Time that each choice took."""
    wait_s: HistogramCounts = field(default_factory=lambda: merged(WAIT_S, ()))
    """Time that each request waited in the router for a replica."""
    reservations: int = 0
    """Requests that replicas were given and have not ended."""
    reserved_tokens: int = 0
    """Prompt tokens that replicas are to compute before the first tokens of these."""
    event_lag_s: HistogramCounts = field(default_factory=lambda: merged(LAG_S, ()))
    """Time from each batch of a replica's events, as it was sent, to the index."""
    joined: Mapping[str, int] = field(default_factory=dict[str, int])
    """Kind to replicas that came: ``single``, or a ``gang`` of several ranks."""
    gone: Mapping[str, int] = field(default_factory=dict[str, int])
    """Kind to replicas that ended, or were lost."""
    warm_ups: int = 0
    """Hot prefixes that replicas were asked to compute."""
    migrations: Mapping[str, int] = field(default_factory=dict[str, int])
    """Reason to requests that were taken from a replica which had accepted them: ``connection``, ``silence``,
    ``engine``, ``draining``.
    """
    recomputed_tokens: int = 0
    """Tokens of moved requests that were computed once more."""
    waiting: int = 0
    """Requests that wait in the router now."""
    waiting_tokens: int = 0
    """Prompt tokens that they want computed."""
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """Reason to requests that were not served for want of room or time: ``full``, ``pushed_out``, ``deadline``,
    ``expired``.
    """
    promises: Mapping[str, int] = field(default_factory=dict[str, int])
    """What became of the places promised by ``Retry-After``: ``kept``, ``broken``, ``expired``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCost:
    """A replica that could have been chosen."""

    replica: str
    cost: float
    """In the policy's own unit: seconds for ``warm_prefix``."""
    cached_tokens: int
    """Prompt tokens that it was expected to have cached."""
    reason: str
    """The policy's word for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingChoice:
    """Why a request went where it went."""

    request_id: str
    at: float = 0.0
    """When, in seconds since the epoch."""
    prompt_tokens: int
    replica: str | None
    """Who gave the first token; None before it."""
    reason: str
    predicted_tokens: int
    """Prompt tokens that were expected in the replica's cache."""
    actual_tokens: int | None
    """Prompt tokens that it found there; None before the first token."""
    decided_in_s: float
    """Time that the choice took."""
    refusals: tuple[str, ...]
    """What those said who did not take it."""
    candidates: tuple[CandidateCost, ...]
    """Best first."""


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
    resyncs: int = 0
    """Replicas that were asked anew because they lacked what they had told, or had what they had not, since start."""
    silent: int = 0
    """Replicas that live and tell nothing that can be followed: nothing is known of what they have cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """A router of one model: this ingress's own, or another ingress's or handle's, as it told last."""

    name: str
    model: str
    is_own: bool
    in_flight: int
    """Sequences that it has in replicas."""
    silent_s: float
    """Seconds since it was heard; 0 for this ingress's own."""
    figures: Figures
    hit_rates: Mapping[ReplicaId, float] = field(default_factory=dict[ReplicaId, float])
    """Replica to the share of prompt tokens that it had cached lately; only this ingress's own routers tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedPrefix:
    """A node of the tree of prefixes, and whose it is."""

    node: PrefixNode
    model: str
    is_private: bool
    """Only requests with the same salt find it: a tenant's, a group's or a client's own."""
    tenants: tuple[str, ...] = ()
    """Those who are known to share it; none where it is for all keys without a tenant, or the router does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStep:
    """A decision of the autoscaler."""

    at: float
    """Seconds since the epoch."""
    model: str
    before: int
    """Replicas that it wanted until then."""
    after: int
    reason: str


class ClusterState(Protocol):
    """What the API tells of the cluster. Answers come from memory, at once."""

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Every known replica."""
        ...

    def routing(self) -> RoutingStats:
        """What the router has decided so far."""
        ...

    def explain(self, request_id: str = "", limit: int = 1) -> Sequence[RoutingChoice]:
        """The latest choices, newest first, for requests whose id begins with ``request_id``."""
        ...

    def store(self) -> StoreStatus:
        """The metadata store."""
        ...

    def routers(self) -> Sequence[RouterStatus]:
        """The ingress's own routers, and the others that are heard."""
        ...

    def prefixes(self, limit: int) -> Sequence[OwnedPrefix]:
        """At most ``limit`` nodes of the trees of prefixes, hot ones and the latest; parents before children."""
        ...

    def scaling(self) -> Sequence[ScalingStep]:
        """What the autoscaler has decided lately, newest first."""
        ...

    def autoscalers(self) -> Sequence[ScalingStatus]:
        """What it decides now, for each model whose number of replicas follows the work."""
        ...
