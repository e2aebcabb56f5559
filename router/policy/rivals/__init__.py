"""Policies of other projects, restated from their published descriptions and sources, with their defaults.

Facts of each (repository and version) stand in its docstring. They see what theirs would see: those that keep a tree of
what they routed themselves do not look at the index that KV events feed.
"""

from collections.abc import Callable
from random import Random

from ..base import Policy
from .aibrix import Aibrix
from .cache_aware import CacheAware
from .consistent_hash import ConsistentHash
from .dynamo import Dynamo, RouterQueue
from .gorgo import Gorgo
from .llm_d import LlmD, Weights
from .preble import Preble
from .prefix_affinity import PrefixAffinity
from .routed import Scale

RIVALS: dict[str, Callable[[Random, Scale], Policy]] = {
    "sglang": CacheAware,
    "ray": PrefixAffinity,
    "ray10": lambda rng, scale: PrefixAffinity(rng, scale, imbalanced_threshold=10),
    "dynamo": Dynamo,
    "dynamo10": lambda rng, scale: Dynamo(rng, scale, prefill_load_scale=10.0),
    "dynamo_wspt": lambda rng, scale: Dynamo(rng, scale, prefill_load_scale=4.0, queue=RouterQueue()),
    "llmd_precise": LlmD,
    "llmd_base": lambda rng, scale: LlmD(rng, scale, precise=False),
    "llmd_active": lambda rng, scale: LlmD(rng, scale, weights=Weights(prefix=3, queue=0, kv=0, active=2)),
    "aibrix": Aibrix,
    "preble": Preble,
    "gorgo": lambda rng, scale: Gorgo(rng),
    "consistent_hash": ConsistentHash,
}
"""By the names that the simulator and ``--routing-policy`` take."""

__all__ = ["RIVALS", "Scale"]
