"""Consistent hashing of the prompt's beginning with bounded loads (Mirrokni et al., 2018), as KubeAI and others do."""

from hashlib import blake2b
from random import Random

import numpy as np

from ..base import Candidates, Column, Forgetful, Ranking, RoutingRequest
from .routed import Scale


class ConsistentHash(Forgetful):
    """Rendezvous hashing of the first ``prefix_tokens``, past replicas with over ``bound`` times the mean load."""

    name = "consistent_hash"

    def __init__(self, rng: Random, scale: Scale, prefix_tokens: int = 1024, bound: float = 1.25) -> None:
        self._rng = rng
        self._prefix_bytes = 4 * max(1, prefix_tokens // scale.tokens_per_id)
        self._bound = bound

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        load, key = candidates.table[Column.UNFINISHED], request.tokens[: self._prefix_bytes]
        weights = [blake2b(key + name.encode(), digest_size=6).digest() for name in candidates.names]
        costs = np.array([int.from_bytes(weight, "big") for weight in weights], dtype=np.float64)
        full = load + 1 > np.ceil(self._bound * (load.sum() + 1) / max(1, len(candidates)))
        return Ranking(candidates.names, costs + full * 2.0**48, lambda place: "hash", self._rng)
