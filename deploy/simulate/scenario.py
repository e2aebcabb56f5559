"""What to simulate, by names: a trace scaled to a number of replicas and a load, and a policy."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from ...cluster.errors import ConfigError
from ...router.late_binding import LateBinding
from ...router.policy import POLICIES, RIVALS, Policy, Scale, make_policy
from .cluster import Setup
from .costs import ReplicaCosts
from .generators import GENERATORS
from .trace import Trace, at_rate, read_trace, spread, superpose

EAGER = "warm_prefix_eager"
"""``warm_prefix`` that binds every request at once."""
POLICY_NAMES = (*POLICIES, EAGER, *RIVALS)
REPLICAS_PER_COPY = 4


def load_trace(source: str, requests: int | None, seed: int) -> Trace:
    """A file, or one of ``GENERATORS``; its first ``requests``. Raises ConfigError."""
    if source in GENERATORS:
        return GENERATORS[source](requests or 4000, seed)
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"trace: {source} is neither a file nor one of {', '.join(GENERATORS)}", param="trace")
    trace = read_trace(path)
    return spread(trace if requests is None else trace.head(requests), Random(seed))


def scaled(trace: Trace, replicas: int, load: float | None, costs: ReplicaCosts, copies: int | None = None) -> Trace:
    """Enough superposed copies for so many replicas, at that load; None: as fast as it was recorded.

    A load of 1 keeps every replica busy if nothing is cached, with prefill alone.
    """
    trace = superpose(trace, copies or max(1, replicas // REPLICAS_PER_COPY))
    if load is None:
        return replace(trace, requests=at_rate(trace, len(trace.requests) / max(trace.span_s, 1e-9)).requests)
    mean_s = sum(costs.prompt_s(request.input_tokens) for request in trace.requests) / len(trace.requests)
    return at_rate(trace, load * replicas / mean_s)


def setup_of(policy: str, num_replicas: int, trace: Trace, backlog_s: float = 0.4, **options: object) -> Setup:
    """A setup for a policy by name, with production's late binding. Raises ConfigError for an unknown name."""
    if policy not in POLICY_NAMES:
        raise ConfigError(f"policy: {policy!r} is not one of {', '.join(POLICY_NAMES)}", param="policy")
    late = None if policy == EAGER else LateBinding(backlog_s=backlog_s)
    name = "warm_prefix" if policy == EAGER else policy
    make = partial(_make, name, Scale(block_ids=1, tokens_per_id=trace.block_tokens))
    return replace(Setup(num_replicas=num_replicas, policy=make, late=late), **options)


def _make(name: str, scale: Scale, rng: Random) -> Policy:
    return make_policy(name, rng, scale)
