"""When a request waits in the router because every good replica is busy. ``waiting_line`` says who goes first."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .policy.base import Candidates, Column, Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBinding:
    """When a request waits in the router, and who goes first.

    Bound early, it would stand in one replica's queue while another becomes free, and behind longer ones.
    """

    backlog_s: float = 0.4
    """It waits while the replica that is best for it has more than this to prefill. Busy ones become dearer for it
    with every second, so it takes a free one in the end.
    """
    aging: float = 0.003
    """A second of waiting outweighs so many seconds of work: nobody is overtaken for ever."""
    stall_s: float = 5.0
    """After so long without news of any request the first in line is bound whatever the backlog."""
    tries: int = 16
    """Requests looked at, from the first in line, whenever a replica may have become free."""
    in_turn: bool = True
    """See ``Binding``."""

    needs_slot: bool = False
    """It also waits while the replica has no batch slot for it: no part of a bounded queue may hide in replicas."""

    def is_free(self, candidates: Candidates, place: int) -> bool:
        """See ``Binding``."""
        return bool(self._free(candidates)[place])

    def any_free(self, candidates: Candidates) -> bool:
        """See ``Binding``."""
        return bool(self._free(candidates).any())

    def _free(self, candidates: Candidates) -> NDArray[np.bool_]:
        free = candidates.backlog_s <= self.backlog_s
        if self.needs_slot:
            free &= candidates.occupancy < candidates.table[Column.MAX_NUM_SEQS]
        return free

    def work(self, candidates: Candidates, place: int, prompt_tokens: int) -> float:
        """Seconds of its own prefill where it would go now."""
        return float(candidates.prefill_s(candidates.uncached(prompt_tokens))[place])

    def after(self, waited_s: float, candidates: Candidates, ranking: Ranking, wanted: NDArray[np.bool_]) -> Ranking:
        """Others go first where it wants to go: what it waited is what it had better believe of busy replicas.

        It takes a free one that nobody else in line prefers. Else, when all replicas are busy, all would give up their
        prefixes, compute everything again, and be busier still.
        """
        return ranking.dearer((candidates.backlog_s > self.backlog_s) | wanted, waited_s)
