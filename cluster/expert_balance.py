"""Placing experts by load: copies for the hot ones, equal work for all ranks.

The idea of DeepSeek's expert parallel load balancer (EPLB): replicate by load, then pack the longest first. Here the
packing is then improved by swaps, and copies of an expert always stand on different ranks.
"""

import heapq
from collections.abc import Sequence

from .expert_placement import ExpertPlacement

_Copy = tuple[float, int]
"""(load, expert)"""


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
    copies = [(load / count, expert) for expert, (load, count) in enumerate(zip(loads, counts, strict=True))]
    packing = _Packing(num_ranks, slots_per_rank)
    for load, expert in sorted(copies, key=lambda copy: (-copy[0], copy[1])):
        for _ in range(counts[expert]):
            packing.add((load, expert))
    packing.improve()
    return ExpertPlacement(len(loads), packing.slots())


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
    """Bins of equal size, one a rank, no expert twice in a bin."""

    def __init__(self, num_ranks: int, size: int) -> None:
        self._size = size
        self._bins: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        self._loads = [0.0] * num_ranks

    def add(self, copy: _Copy) -> None:
        """Put a copy on the least loaded rank that has a slot and not yet this expert."""
        expert = copy[1]
        free = [rank for rank, held in enumerate(self._bins) if len(held) < self._size]
        fitting = [rank for rank in free if expert not in self._bins[rank]]
        if fitting:
            self._put(min(fitting, key=lambda rank: self._loads[rank]), copy)
            return
        # Every rank with room holds the expert: a full one without it gives another expert away. There is one, for an
        # expert has at most one copy a rank; and it holds more experts than the one with room.
        target = next(rank for rank, held in enumerate(self._bins) if expert not in held)
        given = next((load, other) for other, load in self._bins[target].items() if other not in self._bins[free[0]])
        self._take(target, given[1])
        self._put(free[0], given)
        self._put(target, copy)

    def improve(self) -> None:
        """Swap copies between the fullest rank and others for as long as that lowers the fuller of the two."""
        for _ in range(4 * self._size * len(self._bins)):
            fullest = max(range(len(self._bins)), key=lambda rank: self._loads[rank])
            swaps = (self._best_swap(fullest, other) for other in range(len(self._bins)) if other != fullest)
            gain, other, mine, theirs = max(swaps, default=(0.0, 0, 0, 0), key=lambda swap: swap[0])
            if gain <= 1e-3 * self._loads[fullest]:
                return
            self._swap(fullest, mine, other, theirs)

    def slots(self) -> tuple[tuple[int, ...], ...]:
        """[ranks][slots] experts, in order of their numbers."""
        return tuple(tuple(sorted(held)) for held in self._bins)

    def _best_swap(self, full: int, other: int) -> tuple[float, int, int, int]:
        """(gain, other, expert given, expert taken): how much lower the fuller of the two ranks would be."""
        best, high, low = (0.0, other, -1, -1), self._loads[full], self._loads[other]
        for mine, load in self._bins[full].items():
            if mine in self._bins[other]:
                continue
            for theirs, lighter in self._bins[other].items():
                moved = load - lighter
                gain = min(moved, high - low - moved)
                if gain > best[0] and theirs not in self._bins[full]:
                    best = (gain, other, mine, theirs)
        return best

    def _swap(self, rank: int, mine: int, other: int, theirs: int) -> None:
        given, taken = self._take(rank, mine), self._take(other, theirs)
        self._put(rank, (taken, theirs))
        self._put(other, (given, mine))

    def _put(self, rank: int, copy: _Copy) -> None:
        load, expert = copy
        self._bins[rank][expert] = load
        self._loads[rank] += load

    def _take(self, rank: int, expert: int) -> float:
        load = self._bins[rank].pop(expert)
        self._loads[rank] -= load
        return load
