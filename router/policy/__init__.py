"""Routing policies: pure choices over what a router sees, the same in an ingress, in Serve and in a simulator."""

from collections.abc import Callable
from random import Random

from ...cluster.errors import ConfigError
from .base import Candidates, Column, Policy, Ranked, Ranking, RoutingRequest
from .classic import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin, SessionAffinity
from .rivals import RIVALS, Scale
from .warm_prefix import WarmPrefix, WarmPrefixWeights

POLICIES: dict[str, Callable[[Random], Policy]] = {
    WarmPrefix.name: WarmPrefix,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
    PowerOfTwo.name: PowerOfTwo,
    LeastLoaded.name: LeastLoaded,
    SessionAffinity.name: SessionAffinity,
}
"""By the names that ``--routing-policy`` takes, with those of ``RIVALS``."""

__all__ = [
    "POLICIES",
    "RIVALS",
    "Candidates",
    "Column",
    "Policy",
    "Ranked",
    "Ranking",
    "RoutingRequest",
    "Scale",
    "WarmPrefix",
    "WarmPrefixWeights",
    "make_policy",
]


def make_policy(name: str = WarmPrefix.name, rng: Random | None = None, scale: Scale | None = None) -> Policy:
    """A policy of its own for each router. ``scale`` is for rivals. Raises ConfigError for an unknown name."""
    rng = rng or Random()
    if name in POLICIES:
        return POLICIES[name](rng)
    if name in RIVALS:
        return RIVALS[name](rng, scale or Scale())
    known = ", ".join([*POLICIES, *RIVALS])
    raise ConfigError(f"unknown routing policy {name!r}; there are {known}", param="routing_policy")
