"""Placing experts by load: copies for the hot ones, equal work for all ranks.

The idea of DeepSeek's expert parallel load balancer (EPLB): replicate by load, then pack the longest first. Here the
packing is then improved by swaps, and copies of an expert always stand on different ranks.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .expert_placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """How the experts of a sparse layer are loaded, as its ranks found it when they last looked."""

    layer: int
    """In the model."""
    loads: tuple[float, ...]
    """By expert, tokens that chose it, old ones forgotten by and by."""
    imbalance_at_start: float
    """Max / mean rank load that these would give, had the experts stayed where they were placed at the start."""
    imbalance: float
    """As they are placed now."""
    num_moves: int
    """Experts that ranks have taken over from others since the start."""


class ExpertLoads:
    """Tokens per expert and layer, with old ones forgotten: a step weighs half after ``half_life`` later ones."""

    def __init__(self, num_layers: int, num_experts: int, half_life: float = 256.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._loads = [[0.0] * num_experts for _ in range(num_layers)]

    def record(self, layer: int, counts: Sequence[float], steps: int = 1) -> None:
        """Add the tokens that each expert of a layer got in the last ``steps`` steps."""
        keep = self._keep**steps
        self._loads[layer] = [load * keep + count for load, count in zip(self._loads[layer], counts, strict=True)]

    def loads(self, layer: int) -> tuple[float, ...]:
        """[num_experts] loads of a layer."""
        return tuple(self._loads[layer])


def balanced_placement(loads: Sequence[float], num_ranks: int, slots_per_rank: int) -> ExpertPlacement:
    """Experts and copies so that ranks have about equal load. The ranks' order means nothing yet: see expert_moves.

    ``loads`` [num_experts]; num_experts <= num_ranks * slots_per_rank, and slots_per_rank <= num_experts.
    """
    counts = copy_counts(loads, num_ranks, num_ranks * slots_per_rank)
    packing = _Packing(num_ranks, slots_per_rank, [load / count for load, count in zip(loads, counts, strict=True)])
    packing.fill(counts)
    packing.improve()
    return ExpertPlacement(len(loads), packing.slots())


def improved_placement(start: ExpertPlacement, loads: Sequence[float], goal: float) -> ExpertPlacement:
    """``start`` with the copies that the loads ask for, and swaps only until max / mean rank load is at most ``goal``.

    Most experts stay where they are. The goal may be missed.
    """
    counts = copy_counts(loads, start.num_ranks, start.num_ranks * start.slots_per_rank)
    shares = [load / count for load, count in zip(loads, counts, strict=True)]
    packing = _Packing(start.num_ranks, start.slots_per_rank, shares)
    packing.keep(start, counts)
    packing.fill(counts)
    packing.improve(goal)
    return ExpertPlacement(start.num_experts, packing.slots())


def copy_counts(loads: Sequence[float], num_ranks: int, num_copies: int) -> list[int]:
    """Copies of each expert, at most one a rank, so that the most loaded copy has as little as possible."""
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)] if num_ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(num_copies - len(loads)):
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < num_ranks:
            heapq.heappush(heap, (-loads[expert] / counts[expert], expert))
    return counts


class _Packing:
    """Bins of equal size, one a rank, no expert twice in a bin. ``shares``: load of one copy of each expert."""

    def __init__(self, num_ranks: int, size: int, shares: Sequence[float]) -> None:
        self._size = size
        self._shares = shares
        self._bins: list[set[int]] = [set() for _ in range(num_ranks)]
        self._loads = [0.0] * num_ranks

    def keep(self, placement: ExpertPlacement, counts: Sequence[int]) -> None:
        """Begin with a placement; copies beyond ``counts`` leave the fullest ranks."""
        for rank, experts in enumerate(placement.slots):
            for expert in experts:
                self._put(rank, expert)
        for expert, copies in enumerate(placement.copies()):
            for _ in range(len(copies) - counts[expert]):
                holders = [rank for rank, held in enumerate(self._bins) if expert in held]
                self._take(max(holders, key=lambda rank: self._loads[rank]), expert)

    def fill(self, counts: Sequence[int]) -> None:
        """Add the copies that are missing, largest load first."""
        held = Counter(expert for experts in self._bins for expert in experts)
        for expert in sorted(range(len(counts)), key=lambda expert: (-self._shares[expert], expert)):
            for _ in range(counts[expert] - held[expert]):
                self._add(expert)

    def improve(self, goal: float = 1.0) -> None:
        """Swap copies between the fullest rank and others for as long as that lowers the fuller of the two."""
        enough = goal * sum(self._loads) / len(self._loads)
        for _ in range(4 * self._size * len(self._bins)):
            fullest = max(range(len(self._bins)), key=lambda rank: self._loads[rank])
            if self._loads[fullest] <= enough:
                return
            swaps = (self._best_swap(fullest, other) for other in range(len(self._bins)) if other != fullest)
            gain, other, mine, theirs = max(swaps, default=(0.0, 0, 0, 0), key=lambda swap: swap[0])
            if gain <= 1e-3 * self._loads[fullest]:
                return
            for source, target, expert in ((fullest, other, mine), (other, fullest, theirs)):
                self._take(source, expert)
                self._put(target, expert)

    def slots(self) -> tuple[tuple[int, ...], ...]:
        """[ranks][slots] experts, in order of their numbers."""
        return tuple(tuple(sorted(held)) for held in self._bins)

    def _add(self, expert: int) -> None:
        """Put a copy on the least loaded rank that has a slot and not yet this expert."""
        free = [rank for rank, held in enumerate(self._bins) if len(held) < self._size]
        target = min((rank for rank in free if expert not in self._bins[rank]), key=self._loads.__getitem__, default=-1)
        if target < 0:
            # Every rank with room holds the expert: a full one without it gives another expert away. There is one, for
            # an expert has at most one copy a rank; and it holds more experts than the one with room.
            target = next(rank for rank, held in enumerate(self._bins) if expert not in held)
            given = min(self._bins[target] - self._bins[free[0]])
            self._take(target, given)
            self._put(free[0], given)
        self._put(target, expert)

    def _best_swap(self, full: int, other: int) -> tuple[float, int, int, int]:
        """(gain, other, expert given, expert taken): how much lower the fuller of the two ranks would be."""
        best, gap = (0.0, other, -1, -1), self._loads[full] - self._loads[other]
        for mine in sorted(self._bins[full] - self._bins[other]):
            for theirs in sorted(self._bins[other] - self._bins[full]):
                moved = self._shares[mine] - self._shares[theirs]
                gain = min(moved, gap - moved)
                if gain > best[0]:
                    best = (gain, other, mine, theirs)
        return best

    def _put(self, rank: int, expert: int) -> None:
        self._bins[rank].add(expert)
        self._loads[rank] += self._shares[expert]

    def _take(self, rank: int, expert: int) -> None:
        self._bins[rank].remove(expert)
        self._loads[rank] -= self._shares[expert]
