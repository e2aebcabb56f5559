"""Preble's E2 (arXiv 2407.00023; preble @8e7906a)."""

from collections import deque
from random import Random

import numpy as np

from ....cluster.ids import ReplicaId
from ..base import Candidates, Column, Numbers, Ranking, RoutingRequest
from .routed import Remembering, Scale

_WINDOW_S = 180.0


class Preble(Remembering):
    """Exploit: where most of the prompt is, if that is more than half of it and the replica is not overloaded.
    Explore: the least load of the last 3 minutes + cost of this request, in seconds.
    """

    name = "preble"

    def __init__(self, rng: Random, scale: Scale, overload: float = 2.0, mean_output: float = 200.0) -> None:
        super().__init__(scale)
        self._rng = rng
        self._overload = overload
        self._mean_output = mean_output
        self._windows: dict[ReplicaId, deque[tuple[float, float]]] = {}
        self._work: dict[ReplicaId, float] = {}
        self._last: tuple[Candidates, Numbers] | None = None

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        names = candidates.names
        if not names:
            return Ranking(names, candidates.cached_tokens, lambda place: "explore", self._rng)
        matched = self.routed_prefixes.matched(self.scale.keys(request), names) * self.scale.block_tokens
        matched = np.minimum(matched, request.prompt_tokens - 1)
        prefill = candidates.prefill_s(request.prompt_tokens - matched)
        work = self._recent(candidates)
        decode = self._mean_output * candidates.table[Column.DECODE_STEP_S]
        self._last = candidates, prefill + decode
        explore = work + prefill
        longest = matched.max()
        if longest > request.prompt_tokens - longest:
            best = matched == longest
            if work[best].min() <= self._overload * max(work.mean(), 1e-9):
                costs = np.where(best, work, explore + work.max() + 1.0)
                return Ranking(names, costs, lambda place: "exploit", self._rng)
        return Ranking(names, explore, lambda place: "explore", self._rng)

    def routed(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""
        super().routed(request, replica)
        if self._last is not None and replica in self._last[0].names:
            candidates, work = self._last
            seconds = float(work[candidates.names.index(replica)])
            self._windows.setdefault(replica, deque()).append((candidates.now + _WINDOW_S, seconds))
            self._work[replica] = self._work.get(replica, 0.0) + seconds

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
        super().left(replica)
        self._windows.pop(replica, None)
        self._work.pop(replica, None)

    def _recent(self, candidates: Candidates) -> Numbers:
        for name, window in self._windows.items():
            while window and window[0][0] <= candidates.now:
                self._work[name] -= window.popleft()[1]
        return np.array([self._work.get(name, 0.0) for name in candidates.names])
