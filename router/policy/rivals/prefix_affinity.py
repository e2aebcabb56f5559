"""Ray Serve's PrefixCacheAffinityRouter (ray 2.60, llm/_internal/serve/routing_policies/prefix_aware)."""

from random import Random

import numpy as np

from ..base import Candidates, Column, Ranking, RoutingRequest
from .routed import Remembering, Scale


class PrefixAffinity(Remembering):
    """The less loaded of two among those that got most of the prompt, or got least of all if nobody got enough of it;
    of any two while loads differ by more than ``imbalanced_threshold`` requests (default: never).
    """

    name = "ray"

    def __init__(
        self,
        rng: Random,
        scale: Scale,
        imbalanced_threshold: float = float("inf"),
        match_rate_threshold: float = 0.1,
    ) -> None:
        super().__init__(scale)
        self._rng = rng
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        load, names = candidates.table[Column.UNFINISHED], candidates.names
        if not names or load.max() - load.min() > self._imbalanced_threshold:
            return self._less_loaded(list(range(len(names))), candidates, "balance")
        depth, owners = self.routed_prefixes.longest(self.scale.keys(request))
        if depth * self.scale.block_tokens / max(1, request.prompt_tokens) >= self._match_rate_threshold:
            places = [place for place, name in enumerate(names) if name in owners]
            if places:
                return self._less_loaded(places, candidates, "matched")
        sizes = self.routed_prefixes.sizes(names)
        return self._less_loaded(np.flatnonzero(sizes == sizes.min()).tolist(), candidates, "smallest")

    def _less_loaded(self, places: list[int], candidates: Candidates, reason: str) -> Ranking:
        load = candidates.table[Column.UNFINISHED]
        costs = 1.0 + candidates.occupancy
        two = self._rng.sample(places, min(2, len(places)))
        if two:
            costs[min(two, key=lambda place: load[place])] = 0.0
        return Ranking(candidates.names, costs, lambda place: reason, self._rng)
