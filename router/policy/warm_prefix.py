"""The default policy: the replica that costs the least time, all in seconds."""

from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np

from ...cluster.ids import ReplicaId
from .base import Candidates, Column, Forgetful, Numbers, Places, Ranking, RoutingRequest
from .classic import LeastLoaded
from .sessions import Sessions

Share = TypeVar("Share", float, Numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrefixWeights:
    """Tuned on public traces; a replica's prefill rate may be wrong by 3x without much harm."""

    prefill: float = 1.5
    """Extra weight of computing again what another replica holds: it also takes time from those that come later."""
    decode_harm: float = 0.05
    expected_output: float = 200.0
    """Tokens that a request is expected to generate, if it may."""
    kv_pressure_s: float = 3.0
    kv_threshold: float = 0.85
    slot_pressure_s: float = 3.0
    slot_threshold: float = 0.6
    session_s: float = 0.1
    """What a session may cost more at its home than elsewhere."""
    tie_s: float = 0.001
    """Estimates that are no further apart say nothing: the replica with the fewest requests is taken."""


class WarmPrefix(Forgetful):
    """Cost = backlog + (1 + a) * prefill of the uncached tokens + harm to decodes + KV and batch-slot pressure."""

    name = "warm_prefix"
    binds_late = True

    def __init__(self, rng: Random, weights: WarmPrefixWeights | None = None) -> None:
        self._rng = rng
        self._weights = weights or WarmPrefixWeights()
        self._sessions = Sessions()
        self._blind = LeastLoaded(rng)

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Cheapest first, equals in random order. Reasons: ``warm`` (no one holds more), ``load``, ``cold``.

        Replicas that hold as much and cost nearly as much as the cheapest are its equals if they have fewer requests.
        A prompt that is not known (no tokens) goes to the least loaded.
        """
        if not request.prompt_tokens:
            return self._blind.choose(request, candidates)
        cached = candidates.cached_tokens
        warmest = cached.max(initial=0.0)

        def reason(place: int) -> str:
            if not warmest:
                return "cold"
            return "warm" if cached[place] == warmest else "load"

        costs = self.costs(request.prompt_tokens, candidates, request.max_output)
        if request.session and len(candidates):
            home = self._sessions.costs(request.session, candidates.names).argmin()
            costs += self._weights.session_s
            costs[home] -= self._weights.session_s
        return Ranking(candidates.names, costs, reason, self._rng, self._nearly_best(costs, candidates))

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._sessions.forget(replica)

    def _nearly_best(self, costs: Numbers, candidates: Candidates) -> Places:
        places = np.flatnonzero(costs <= costs.min(initial=np.inf) + self._weights.tie_s)
        if len(places) > 1:
            cached = candidates.cached_tokens[places]
            places = places[cached == cached[costs[places].argmin()]]
            busy = candidates.occupancy[places]
            places = places[busy == busy.min()]
        return places

    def costs(self, prompt_tokens: int, candidates: Candidates, max_output: float) -> Numbers:
        """Seconds that the request costs everyone on each replica."""
        weights, table = self._weights, candidates.table
        running, usage = candidates.occupancy, np.minimum(1.0, table[Column.KV_USAGE])
        slowdown = decode_slowdown(usage)
        slower = decode_slowdown(np.minimum(1.0, usage + prompt_tokens / table[Column.KV_TOTAL_TOKENS]))
        harm = table[Column.DECODE_STEP_S] * (slower + running * (slower - slowdown))
        return (
            candidates.backlog_s
            + (1.0 + weights.prefill) * candidates.prefill_s(candidates.uncached(prompt_tokens))
            + weights.decode_harm * min(weights.expected_output, max_output) * harm
            + weights.kv_pressure_s * np.maximum(0.0, usage - weights.kv_threshold)
            + weights.slot_pressure_s * np.maximum(0.0, running / table[Column.MAX_NUM_SEQS] - weights.slot_threshold)
        )


def decode_slowdown(kv_usage: Share) -> Share:
    """How much longer a decode step takes with that share (at most 1) of the KV cache in use: the shape that Dynamo's
    mocker fits to vLLM, relative to an empty cache.
    """
    return 1.0 + (9.41 - 4.48 * kv_usage) * kv_usage
