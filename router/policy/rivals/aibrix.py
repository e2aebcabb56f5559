"""aibrix's prefix-cache algorithm (aibrix @e3e10f9, gateway prefix_cache.go)."""

from random import Random

from ..base import Candidates, Column, Ranking, RoutingRequest
from .routed import Remembering, Scale, prefer


class Aibrix(Remembering):
    """The fewest requests while these differ by more than ``imbalance``; else the best match among those that have at
    most mean + ``deviations`` standard deviations of requests; else the fewest requests.
    """

    name = "aibrix"

    def __init__(self, rng: Random, scale: Scale, imbalance: int = 8, deviations: float = 1.0) -> None:
        super().__init__(scale)
        self._rng = rng
        self._imbalance = imbalance
        self._deviations = deviations

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        load, names = candidates.table[Column.UNFINISHED], candidates.names
        if names and load.max() - load.min() <= self._imbalance:
            matched = self.routed_prefixes.matched(self.scale.keys(request), names)
            usable = (matched > 0) & (load <= load.mean() + self._deviations * load.std())
            if usable.any():
                best = usable & (matched == matched[usable].max())
                best &= load == load[best].min()
                return Ranking(names, prefer(best, candidates), lambda place: "matched", self._rng)
        return Ranking(names, load.copy(), lambda place: "least_requests", self._rng)
