"""SGLang's router (sglang-router 0.3.2, smg @73da68c, policies/cache_aware)."""

from random import Random

import numpy as np

from ..base import Candidates, Column, Ranking, RoutingRequest
from .routed import Remembering, Scale, prefer


class CacheAware(Remembering):
    """Shortest queue while loads are out of balance; else whoever got most of the prompt, if that is enough of it.

    It keeps a tree of what it routed, which forgets only beyond ``--max-tree-size`` (2**26 characters for each replica:
    more than a KV cache holds, so here never).
    """

    name = "sglang"

    def __init__(
        self,
        rng: Random,
        scale: Scale,
        cache_threshold: float = 0.3,
        balance_abs_threshold: float = 64,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        super().__init__(scale)
        self._rng = rng
        self._cache_threshold = cache_threshold
        self._abs, self._rel = balance_abs_threshold, balance_rel_threshold

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        load = candidates.table[Column.UNFINISHED]
        most, least = load.max(initial=0), load.min(initial=np.inf)
        if most - least > self._abs and most > least * self._rel:
            return Ranking(candidates.names, load.copy(), lambda place: "balance", self._rng)
        depth, owners = self.routed_prefixes.longest(self.scale.keys(request))
        matched = depth * self.scale.block_tokens / max(1, request.prompt_tokens)
        latest = next((name for name in reversed(owners) if name in candidates.names), None)
        if matched <= self._cache_threshold or latest is None:
            return Ranking(candidates.names, load.copy(), lambda place: "cold", self._rng)
        places = np.array([name == latest for name in candidates.names])
        return Ranking(candidates.names, prefer(places, candidates), lambda place: "matched", self._rng)
