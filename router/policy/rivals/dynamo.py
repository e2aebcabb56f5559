"""NVIDIA Dynamo's KV router (ai-dynamo-runtime 1.6.1, kv-router selector/default.rs); also Ray's KVAwareRouter."""

from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ....cluster.ids import ReplicaId
from ..base import Binding, Candidates, Column, Ranking, RoutingRequest
from .routed import ActiveBlocks, Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterQueue:
    """Its queue (scheduling/queue.rs and policy.rs): a request waits while every replica has more to prefill than
    ``threshold`` of a step. ``wspt``: weighted shortest processing time, by tokens that are cached nowhere, without
    ageing; ``fcfs``: the first that came.
    """

    threshold: float = 1.0
    policy: Literal["fcfs", "wspt"] = "wspt"
    step_tokens: int = 8192
    """``max_num_batched_tokens`` of the replicas."""
    aging: float = 0.0
    stall_s: float = float("inf")
    tries: int = 1
    in_turn: bool = False

    def is_free(self, candidates: Candidates, place: int) -> bool:
        """See ``Binding``."""
        return self.any_free(candidates)

    def any_free(self, candidates: Candidates) -> bool:
        """See ``Binding``."""
        return bool(candidates.table[Column.SENT_TOKENS].min() <= self.threshold * self.step_tokens)

    def work(self, candidates: Candidates, place: int, prompt_tokens: int) -> float:
        """See ``Binding``."""
        return float(candidates.uncached(prompt_tokens).min()) if self.policy == "wspt" else 0.0

    def after(self, waited_s: float, candidates: Candidates, ranking: Ranking, wanted: NDArray[np.bool_]) -> Ranking:
        """See ``Binding``."""
        return ranking


class Dynamo:
    """``prefill_load_scale`` * blocks to prefill there, with this request + blocks in use there, with this request +
    ``request_weight`` * requests there.

    It knows caches from events; temperature 0; its weakness: a resident block costs as much as one to compute.
    """

    name = "dynamo"
    binds_late = False

    def __init__(
        self,
        rng: Random,
        scale: Scale,
        prefill_load_scale: float = 1.0,
        request_weight: float = 0.0,
        queue: RouterQueue | None = None,
    ) -> None:
        self._rng = rng
        self._scale = scale
        self._prefill_load_scale = prefill_load_scale
        self._request_weight = request_weight
        self._queue = queue
        self._active = ActiveBlocks()

    def binding(self, late: Binding | None) -> Binding | None:
        """See ``Policy``: its own queue, if it has one."""
        return self._queue

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """See ``Policy``."""
        waiting = candidates.table[Column.SENT_TOKENS] + request.prompt_tokens - candidates.cached_tokens
        prefill = np.maximum(0.0, waiting) / self._scale.block_tokens
        active = self._active.with_request(self._whole(request), candidates.names)
        costs = self._prefill_load_scale * prefill + active
        if self._request_weight:
            costs += self._request_weight * candidates.table[Column.UNFINISHED]
        return Ranking(candidates.names, costs, lambda place: "cost", self._rng)

    def routed(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._active.add(request.request_id, self._whole(request), replica)

    def first_token(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def finished(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._active.remove(request.request_id, replica)

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._active.drop(replica)

    def _whole(self, request: RoutingRequest) -> list[int]:
        """It counts no block that the prompt fills only in part."""
        return self._scale.keys(request)[: request.prompt_tokens // self._scale.block_tokens]
