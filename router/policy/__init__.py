"""Routing policies: pure choices over what a router sees, the same in an ingress, in Serve and in a simulator."""

from collections.abc import Callable
from random import Random

from ...cluster.errors import ConfigError
from .base import Candidates, Column, Policy, Ranked, Ranking, RoutingRequest
from .classic import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin, SessionAffinity
from .warm_prefix import WarmPrefix, WarmPrefixWeights

POLICIES: dict[str, Callable[[Random], Policy]] = {
    WarmPrefix.name: WarmPrefix,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
    PowerOfTwo.name: PowerOfTwo,
    LeastLoaded.name: LeastLoaded,
    SessionAffinity.name: SessionAffinity,
}
"""By the names that ``--routing-policy`` takes."""

__all__ = [
    "POLICIES",
    "Candidates",
    "Column",
    "Policy",
    "Ranked",
    "Ranking",
    "RoutingRequest",
    "WarmPrefix",
    "WarmPrefixWeights",
    "make_policy",
]


def make_policy(name: str = WarmPrefix.name, rng: Random | None = None) -> Policy:
    """A policy of its own for each router. Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; there are {', '.join(POLICIES)}", param="routing_policy")
    return POLICIES[name](rng or Random())
