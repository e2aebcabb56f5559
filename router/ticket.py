"""What a router keeps of a request: why it went where it went, and how far it is."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..cluster.errors import WarmrootError
from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import TokenDelta
from .fleet import KnownReplica
from .policy.base import Numbers, Ranked, Ranking, RoutingRequest
from .policy.in_flight import Reservation


@dataclass(slots=True, eq=False)
class Decision:
    """Why a request went where it went."""

    request_id: RequestId
    prompt_tokens: int
    ranking: Ranking
    """All candidates with their costs, best first."""
    cached_tokens: Numbers
    """Prompt tokens that each candidate was expected to have cached, in the order of ``ranking.names``."""
    seconds: float
    """Time the choice took."""
    at: float = 0.0
    """When it was made, by the router's clock."""
    chosen: Ranked | None = None
    """Who accepted."""
    predicted_tokens: int = 0
    actual_tokens: int | None = None
    """Cached tokens that the chosen replica found, once it has said so."""
    refusals: list[WarmrootError] = field(default_factory=list[WarmrootError])

    @property
    def cached(self) -> dict[ReplicaId, int]:
        """``cached_tokens`` by name."""
        return dict(zip(self.ranking.names, map(int, self.cached_tokens), strict=True))


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way. Only the core changes it."""

    request: RoutingRequest
    on_bound: Callable[["Ticket"], None]
    """Called when a request that had to wait got its replica, or was ``refused`` one."""
    arrived: float
    decision: Decision | None = None
    reservation: Reservation | None = None
    """The place it has on a replica."""
    member: KnownReplica | None = None
    """That replica."""
    moved: bool = False
    """Another replica had accepted it."""
    tried: set[ReplicaId] = field(default_factory=set[ReplicaId])
    idle: bool = False
    """The replica had nothing else to prefill when the request was bound."""
    bound_at: float = 0.0
    first_at: float = 0.0
    preferred: ReplicaId | None = None
    """While it waits: the replica that was best for it when it was last looked at."""
    refused: WarmrootError | None = None
    """Why it has not got a replica after it had waited."""

    @property
    def replica(self) -> ReplicaId | None:
        """Where it is bound to; None while it waits, after its end, or if nobody is left to try."""
        return self.reservation.replica if self.reservation else None

    def reported(self, first: TokenDelta) -> TokenDelta:
        """A first delta with what the router has to say of its request."""
        report, decision = first.report, self.decision
        if report is None or decision is None:
            return first
        waited_s = self.bound_at - self.arrived
        return replace(first, report=replace(report, router_s=waited_s, predicted_tokens=decision.predicted_tokens))
