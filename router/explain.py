"""Decisions of a router as the API shows them: every candidate with its cost, best first."""

from collections.abc import Iterable, Iterator
from itertools import islice

from .core import Decision
from .openai.cluster_state import CandidateCost, RoutingChoice


def explained(
    decisions: Iterable[Decision], request_id: str, limit: int, wall_ahead_s: float = 0.0
) -> list[RoutingChoice]:
    """The newest ``limit`` of ``decisions``, newest first, of requests whose id begins so. Given newest first.

    ``wall_ahead_s``: the wall clock less the router's.
    """
    return [_choice(decision, wall_ahead_s) for decision in islice(_of(decisions, request_id), limit)]


def _of(decisions: Iterable[Decision], request_id: str) -> Iterator[Decision]:
    return (decision for decision in decisions if decision.request_id.startswith(request_id))


def _choice(decision: Decision, wall_ahead_s: float) -> RoutingChoice:
    chosen, cached = decision.chosen, decision.cached
    return RoutingChoice(
        request_id=decision.request_id,
        at=decision.at + wall_ahead_s,
        prompt_tokens=decision.prompt_tokens,
        replica=chosen and chosen.replica,
        reason="refused" if decision.refusals else (chosen or decision.ranking.best).reason,
        predicted_tokens=decision.predicted_tokens,
        actual_tokens=decision.actual_tokens,
        decided_in_s=decision.seconds,
        refusals=tuple(error.message for error in decision.refusals),
        candidates=tuple(
            CandidateCost(
                replica=ranked.replica,
                cost=ranked.cost,
                cached_tokens=cached[ranked.replica],
                reason=ranked.reason,
            )
            for ranked in decision.ranking
        ),
    )
