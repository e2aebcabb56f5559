"""llm-d's endpoint picker (llm-d-router @ebab687: plugin READMEs and guides' configurations)."""

from dataclasses import dataclass
from random import Random

import numpy as np

from ..base import Candidates, Column, Numbers, Ranking, RoutingRequest
from .routed import Remembering, Scale

_LRU_TOKENS = 2**20
"""The approximate scorer remembers as much of each replica as its KV memory holds (autoTune)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the scorers, each of which gives 0..1."""

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0
    active: float = 0.0
    tokens: float = 0.0
    """Of the token load scorer: prompt tokens that are still to be computed."""


class LlmD(Remembering):
    """The highest sum of weighted scores. ``precise``: cached prefixes from KV events, with speculative entries; else
    from what it routed.
    """

    name = "llmd_precise"

    def __init__(self, rng: Random, scale: Scale, *, precise: bool = True, weights: Weights | None = None) -> None:
        super().__init__(scale, most_blocks=_LRU_TOKENS // scale.block_tokens)
        self._rng = rng
        self._precise = precise
        self._weights = weights or Weights()

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        table, weights = candidates.table, self._weights
        if not len(candidates):
            return Ranking(candidates.names, table[Column.RUNNING], lambda place: "score", self._rng)
        score = (
            weights.prefix * self._prefix(request, candidates)
            + weights.queue * _lower_is_better(table[Column.WAITING])
            + weights.kv * (1.0 - table[Column.KV_USAGE])
        )
        if weights.active:
            score += weights.active * _lower_is_better(table[Column.UNFINISHED])
        if weights.tokens:
            score += weights.tokens * _lower_is_better(table[Column.WAITING_TOKENS])
        return Ranking(candidates.names, -score, lambda place: "score", self._rng)

    def _prefix(self, request: RoutingRequest, candidates: Candidates) -> Numbers:
        if self._precise:
            cached = candidates.cached_tokens
        else:
            keys = self.scale.keys(request)
            cached = self.routed_prefixes.matched(keys, candidates.names) * self.scale.block_tokens
        return np.minimum(1.0, cached / max(1, request.prompt_tokens))


def _lower_is_better(values: Numbers) -> Numbers:
    """1 for the lowest, 0 for the highest."""
    least, most = values.min(), values.max()
    return (most - values) / (most - least) if most > least else np.ones_like(values)
