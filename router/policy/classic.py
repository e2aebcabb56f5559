"""Policies that everyone has, to choose and to compare with. None looks at the prefix."""

from random import Random

import numpy as np

from ...cluster.ids import ReplicaId
from .base import Candidates, Forgetful, Numbers, Ranking, RoutingRequest
from .sessions import Sessions


class RoundRobin(Forgetful):
    """One after the other, in the order of their names."""

    name = "round_robin"

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._turn = 0

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Cost: how many turns away."""
        count = len(candidates)
        turns = np.empty(count)
        order = sorted(range(count), key=candidates.names.__getitem__)
        turns[order] = (np.arange(count) - self._turn) % max(1, count)
        self._turn += 1
        return Ranking(candidates.names, turns, lambda place: "turn", self._rng)


class RandomChoice(Forgetful):
    """Any."""

    name = "random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Cost: place in the draw."""
        return Ranking(candidates.names, _draw(len(candidates), self._rng), lambda place: "random", self._rng)


class LeastLoaded(Forgetful):
    """The fewest requests first."""

    name = "least_loaded"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Cost: requests there."""
        return Ranking(candidates.names, candidates.occupancy, lambda place: "least_loaded", self._rng)


class PowerOfTwo(Forgetful):
    """The less loaded of two drawn at random (Mitzenmacher, 2001); the others follow in the order drawn."""

    name = "power_of_two"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Cost: place in the draw, after the comparison."""
        places, load = _draw(len(candidates), self._rng), candidates.occupancy
        two = np.flatnonzero(places < 2)
        if len(two) == 2 and load[two[0]] != load[two[1]]:
            places[two] = (0, 1) if load[two[0]] < load[two[1]] else (1, 0)
        return Ranking(candidates.names, places, lambda place: "power_of_two", self._rng)


class SessionAffinity(Forgetful):
    """Always the same replica for a session (rendezvous hashing); the least loaded without one."""

    name = "session_affinity"

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._sessions = Sessions()
        self._without = LeastLoaded(rng)

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Cost: a hash of session and replica, 0..1."""
        if not request.session:
            return self._without.choose(request, candidates)
        costs = self._sessions.costs(request.session, candidates.names)
        return Ranking(candidates.names, costs, lambda place: "session", self._rng)

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self._sessions.forget(replica)


def _draw(count: int, rng: Random) -> Numbers:
    """A random place for each."""
    return np.array(rng.sample(range(count), count), dtype=np.float64)
