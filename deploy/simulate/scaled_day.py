"""What a scaler makes of a day: how many requests are in time, and what the replicas cost."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cluster import uncollected
from .costs import ReplicaCosts
from .elastic import ElasticCluster, Elasticity, Scaler
from .overload import Slo
from .scenario import setup_of
from .trace import Trace

COSTS = ReplicaCosts(
    prefill_fixed_s=0.02,
    prefill_token_s=4e-4,
    prefill_square_s=0.0,
    decode_fixed_s=0.025,
    decode_usage_s=0.06,
    decode_usage_square_s=0.0,
    kv_tokens=262_144,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    max_prefill_chunk=512,
)
"""A large model on few GPUs: 2,500 prompt tokens a second, and 40 output tokens a second of a lone stream."""
SLO = Slo(ttft_s=5.0, itl_s=0.15)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of one or several days under one scaler; sums and all requests together."""

    ttft_s: "np.ndarray[Any, np.dtype[np.float64]]"
    itl_s: "np.ndarray[Any, np.dtype[np.float64]]"
    """Mean time between two tokens of each request."""
    hit_tokens: float
    prompt_tokens: float
    replica_s: float
    num_changes: int
    most: int
    handed_back: int

    def __add__(self, other: "Outcomes") -> "Outcomes":
        return Outcomes(
            np.concatenate([self.ttft_s, other.ttft_s]),
            np.concatenate([self.itl_s, other.itl_s]),
            self.hit_tokens + other.hit_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.replica_s + other.replica_s,
            self.num_changes + other.num_changes,
            max(self.most, other.most),
            self.handed_back + other.handed_back,
        )

    def summary(self, slo: Slo) -> dict[str, float]:
        """Shares of requests in time, seconds, hours and counts. What never ended was not in time."""
        first, steady = self.ttft_s <= slo.ttft_s, self.itl_s <= slo.itl_s
        return {
            "attainment": float(np.mean(first & steady)),
            "ttft_in_time": float(np.mean(first)),
            "itl_in_time": float(np.mean(steady)),
            "replica_hours": self.replica_s / 3600.0,
            "changes": self.num_changes,
            "most_replicas": self.most,
            "ttft_p50_s": float(np.nanpercentile(self.ttft_s, 50)),
            "ttft_p99_s": float(np.nanpercentile(self.ttft_s, 99)),
            "itl_mean_s": float(np.nanmean(self.itl_s)),
            "hit_rate": self.hit_tokens / max(1.0, self.prompt_tokens),
            "handed_back": self.handed_back,
        }


def live(
    trace: Trace, scaler: Scaler, *, begin_with: int, costs: ReplicaCosts = COSTS, elasticity: Elasticity | None = None
) -> tuple[Outcomes, list[tuple[float, int]]]:
    """A trace through production's router, with what a scaler decides. Also when it changed the number, and to what."""
    setup = setup_of("warm_prefix", begin_with, trace, costs=costs)
    cluster = ElasticCluster(trace, setup, scaler, elasticity or Elasticity())
    with uncollected():
        results = cluster.run()
    bill = cluster.finish()
    outcomes = Outcomes(
        ttft_s=results.ttft_s,
        itl_s=(results.e2e_s - results.ttft_s) / np.maximum(1, results.output_tokens - 1),
        hit_tokens=float(results.cached_tokens.sum()),
        prompt_tokens=float(results.input_tokens.sum()),
        replica_s=bill.replica_s,
        num_changes=len(bill.changes) - 1,
        most=max(number for _, number in bill.changes),
        handed_back=bill.handed_back,
    )
    return outcomes, bill.changes
