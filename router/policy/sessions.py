"""Where a session is at home, without anybody having to remember it: rendezvous hashing (Thaler and Ravishankar, 1998).

Every router gives the same answer, and when a replica comes or goes only its own sessions move.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ...cluster.ids import ReplicaId
from .base import Numbers

_HALF = np.uint64(32)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
"""Of xmxmx, a mixer of 64 bits (Maiga, 2018)."""


class Sessions:
    """Ranks replicas for sessions. What it keeps of a replica is a number, until ``forget``."""

    def __init__(self) -> None:
        self._seeds: dict[ReplicaId, int] = {}

    def costs(self, session: str, names: Sequence[ReplicaId]) -> Numbers:
        """0 to 1 for each of ``names``; the session is at home where it is least."""
        seeds = self._seeds
        try:
            mine: NDArray[np.uint64] = np.array([seeds[name] for name in names], dtype=np.uint64)
        except KeyError:
            seeds.update({name: _digest(name) for name in names if name not in seeds})
            return self.costs(session, names)
        mixed = mine ^ np.uint64(_digest(session))
        for _ in range(2):
            mixed = (mixed ^ (mixed >> _HALF)) * _MULTIPLIER
        return (mixed ^ (mixed >> _HALF)).astype(np.float64) / 2.0**64

    def forget(self, name: ReplicaId) -> None:
        """The replica is gone; it may come back."""
        self._seeds.pop(name, None)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
