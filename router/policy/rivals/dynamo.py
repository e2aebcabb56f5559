"""NVIDIA Dynamo's KV router (ai-dynamo-runtime 1.6.1, kv-router selector/default.rs); also Ray's KVAwareRouter."""

from random import Random

import numpy as np

from ....cluster.ids import ReplicaId
from ..base import Candidates, Column, Ranking, RoutingRequest
from .routed import ActiveBlocks, Scale


class Dynamo:
    """``prefill_load_scale`` * blocks to prefill there, with this request + blocks in use there, with this request.

    It knows caches from events; temperature 0; its weakness: a resident block costs as much as one to compute.
    """

    name = "dynamo"
    binds_late = False

    def __init__(self, rng: Random, scale: Scale, prefill_load_scale: float = 1.0) -> None:
        self._rng = rng
        self._scale = scale
        self._prefill_load_scale = prefill_load_scale
        self._active = ActiveBlocks()

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        waiting = candidates.table[Column.SENT_TOKENS] + request.prompt_tokens - candidates.cached_tokens
        prefill = np.maximum(0.0, waiting) / self._scale.block_tokens
        active = self._active.with_request(self._scale.keys(request), candidates.names)
        return Ranking(candidates.names, self._prefill_load_scale * prefill + active, lambda place: "cost", self._rng)

    def routed(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._active.add(request.request_id, self._scale.keys(request), replica)

    def first_token(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def finished(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._active.remove(request.request_id, replica)

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._active.drop(replica)
