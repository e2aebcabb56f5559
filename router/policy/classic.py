"""Policies that everyone has, to choose and to compare with. None looks at the prefix."""

from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from .base import Candidate, Ranked, RoutingRequest


class RoundRobin:
    """One after the other, in the order of their names."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Cost: how many turns away."""
        ordered = sorted(candidates, key=lambda candidate: candidate.replica)
        start = self._turn % max(1, len(ordered))
        self._turn += 1
        return [_rank(candidate, turn, "turn") for turn, candidate in enumerate(ordered[start:] + ordered[:start])]


class RandomChoice:
    """Any."""

    name = "random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Cost: place in the draw."""
        drawn = self._rng.sample(list(candidates), len(candidates))
        return [_rank(candidate, place, "random") for place, candidate in enumerate(drawn)]


class LeastLoaded:
    """The fewest requests first."""

    name = "least_loaded"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Cost: requests there."""
        shuffled = self._rng.sample(list(candidates), len(candidates))
        ordered = sorted(shuffled, key=lambda candidate: candidate.occupancy)
        return [_rank(candidate, candidate.occupancy, "least_loaded") for candidate in ordered]


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher, 2001); the others follow in the order drawn."""

    name = "power_of_two"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Cost: requests there."""
        drawn = self._rng.sample(list(candidates), len(candidates))
        ordered = sorted(drawn[:2], key=lambda candidate: candidate.occupancy) + drawn[2:]
        return [_rank(candidate, candidate.occupancy, "power_of_two") for candidate in ordered]


class SessionAffinity:
    """Always the same replica for a session (rendezvous hashing); the least loaded without one."""

    name = "session_affinity"

    def __init__(self, rng: Random) -> None:
        self._without = LeastLoaded(rng)

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Cost: place in the session's own order of replicas."""
        if not request.session:
            return self._without.choose(request, candidates)
        ordered = sorted(candidates, key=lambda candidate: _weight(request.session, candidate.replica), reverse=True)
        return [_rank(candidate, place, "session") for place, candidate in enumerate(ordered)]


def _weight(session: str, replica: str) -> bytes:
    return blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()


def _rank(candidate: Candidate, cost: float, reason: str) -> Ranked:
    return Ranked(candidate.replica, float(cost), reason)
