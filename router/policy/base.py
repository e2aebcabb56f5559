"""What a routing policy is given and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...cluster.ids import ReplicaId, RequestId
from ...cluster.messages import Load


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What decides where a request goes. ``session`` is a stickiness key; empty: none."""

    request_id: RequestId
    prompt_tokens: int
    session: str = ""


class Candidate(NamedTuple):
    """A replica as the router sees it at the moment of the choice. A tuple, because a choice makes dozens."""

    replica: ReplicaId
    cached_tokens: int
    """Leading prompt tokens that it holds, or is about to compute for an earlier request."""
    load: Load
    """Its latest word."""
    unfinished: int
    """Requests this router has there."""
    backlog_s: float
    """Prefill that this router has sent and that is not done, by the router's own estimates."""
    prefill_tokens_per_s: float
    decode_step_s: float
    """One step with an empty KV cache."""
    kv_total_tokens: int

    @property
    def occupancy(self) -> int:
        """Requests there: the larger of what it said last and what this router knows."""
        return max(self.load.running + self.load.waiting, self.unfinished)


class Ranked(NamedTuple):
    """One candidate in the order of preference. ``cost`` has the policy's own unit; ``reason`` is one word."""

    replica: ReplicaId
    cost: float
    reason: str


class Policy(Protocol):
    """Orders candidates, best first. Pure but for its own counters and random draws."""

    name: str

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Every candidate once, best first; never raises."""
        ...
