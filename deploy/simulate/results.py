"""What a simulation measured."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cluster.ids import ReplicaId
from ...router.openai.cluster_state import RoutingStats
from .trace import Trace

_PERCENTILES = (50, 90, 99)


@dataclass(slots=True, eq=False)
class Outcome:
    """One request's way. Times are seconds of the virtual clock."""

    number: int
    arrived_at: float
    first_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0
    replica: ReplicaId | None = None
    submitted_at: float = 0.0
    """The last time that its client sent it."""
    refused: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When it was refused, and the seconds after which it was to come back."""


class Results:
    """Filled as requests end."""

    def __init__(self, trace: Trace, num_replicas: int) -> None:
        count = len(trace.requests)
        self.ttft_s = np.full(count, np.nan)
        self.e2e_s = np.full(count, np.nan)
        self.cached_tokens = np.zeros(count)
        self.input_tokens = np.array([request.input_tokens for request in trace.requests])
        self.output_tokens = np.array([request.output_tokens for request in trace.requests])
        self.by_replica: Counter[ReplicaId] = Counter()
        self.resubmitted = 0
        self.routing: list[RoutingStats] = []
        self._num_replicas = num_replicas

    def add(self, outcome: Outcome) -> None:
        """A request ended."""
        if outcome.first_at is not None and outcome.ended_at is not None:
            self.ttft_s[outcome.number] = outcome.first_at - outcome.arrived_at
            self.e2e_s[outcome.number] = outcome.ended_at - outcome.arrived_at
            self.cached_tokens[outcome.number] = outcome.cached_tokens
        if outcome.replica is not None:
            self.by_replica[outcome.replica] += 1

    def summary(self) -> dict[str, Any]:
        """Seconds, shares and counts; ``imbalance`` is requests of the busiest replica over the mean."""
        done = ~np.isnan(self.e2e_s)
        ttft, e2e = self.ttft_s[done], self.e2e_s[done]
        decode = (e2e - ttft) / np.maximum(1, self.output_tokens[done] - 1)
        busiest = max(self.by_replica.values(), default=0)
        predicted = sum(stats.predicted_hit_tokens for stats in self.routing)
        actual = sum(stats.actual_hit_tokens for stats in self.routing)
        return {
            "requests": int(done.sum()),
            "hit_rate": float(self.cached_tokens[done].sum() / max(1, self.input_tokens[done].sum())),
            "ttft_mean_s": float(ttft.mean()),
            **{f"ttft_p{p}_s": float(np.percentile(ttft, p)) for p in _PERCENTILES},
            "e2e_mean_s": float(e2e.mean()),
            **{f"e2e_p{p}_s": float(np.percentile(e2e, p)) for p in _PERCENTILES},
            "tpot_mean_s": float(decode.mean()),
            "imbalance": busiest * self._num_replicas / max(1, int(done.sum())),
            "predicted_over_actual_hits": predicted / actual if actual else None,
            "resubmitted": self.resubmitted,
        }
