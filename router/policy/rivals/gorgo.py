"""GORGO (arXiv 2602.11688; gorgo-lb 0.2.0, policy/gorgo.py)."""

from random import Random

from ..base import Candidates, Column, Forgetful, Ranking, RoutingRequest


class Gorgo(Forgetful):
    """Round-trip time (none here) + uncached tokens + prompt tokens of all requests there until they end, all with
    weight 1.
    """

    name = "gorgo"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        costs = candidates.uncached(request.prompt_tokens) + candidates.table[Column.CONTEXT_TOKENS]
        return Ranking(candidates.names, costs, lambda place: "tokens", self._rng)
