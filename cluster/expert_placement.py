"""Which rank holds which experts, redundant copies included, and which copy a token goes to.

Every rank of an expert parallel group has the same number of slots; a slot holds one expert's weights. An expert that
is asked for more often than others has copies on several ranks. A copy's number is rank * slots per rank + slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from .errors import ConfigError

_MAX_TURNS = 64


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts in each rank's slots; every expert somewhere, and on a rank at most once."""

    num_experts: int
    slots: tuple[tuple[int, ...], ...]
    """[ranks][slots per rank] expert."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the expert parallel group."""
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """Experts, or copies of experts, on a rank."""
        return len(self.slots[0])

    def copies(self) -> tuple[tuple[int, ...], ...]:
        """[num_experts] the numbers of each expert's copies, in order."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for number, expert in enumerate(expert for rank in self.slots for expert in rank):
            found[expert].append(number)
        return tuple(tuple(numbers) for numbers in found)

    def rank_of(self, copy: int) -> int:
        """The rank that holds a copy."""
        return copy // self.slots_per_rank

    def turn_table(self) -> tuple[tuple[int, ...], ...]:
        """[num_experts, turns]: the copy for an expert's choice number n stands in column n % turns.

        turns is a multiple of every expert's copies, or nearly enough, so that each copy is as often there. A lookup by
        (expert, token index) is round robin, and all ranks that see a token agree on its copy without a word.
        """
        copies = self.copies()
        turns = min(_MAX_TURNS, lcm(*(len(numbers) for numbers in copies)))
        return tuple(tuple(numbers[turn % len(numbers)] for turn in range(turns)) for numbers in copies)

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Load of each rank, each expert's being shared evenly among its copies."""
        shares = [load / len(numbers) for load, numbers in zip(loads, self.copies(), strict=True)]
        return [sum(shares[expert] for expert in rank) for rank in self.slots]

    def imbalance(self, loads: Sequence[float]) -> float:
        """Largest rank's load over the mean: 1.0 is perfect, num_ranks the worst."""
        ranks = self.rank_loads(loads)
        return max(ranks) * len(ranks) / sum(ranks) if any(ranks) else 1.0

    def least_loaded_shares(self, counts: Sequence[int]) -> list[int]:
        """Tokens for each copy, by number, when ``counts`` [num_experts] tokens ask for the experts.

        Experts with one copy go first; then, largest first, each token of the others goes to its copy on the rank
        with the fewest. For who knows a whole step's counts: better than turns in small batches.
        """
        copies, shares = self.copies(), [0] * (self.num_ranks * self.slots_per_rank)
        loads = [0] * self.num_ranks
        for expert in sorted(range(self.num_experts), key=lambda e: (len(copies[e]) > 1, -counts[e], e)):
            ranks = [self.rank_of(copy) for copy in copies[expert]]
            filled = level([loads[rank] for rank in ranks], counts[expert])
            for copy, rank, share in zip(copies[expert], ranks, filled, strict=True):
                shares[copy] = share
                loads[rank] += share
        return shares


def level(loads: Sequence[int], amount: int) -> list[int]:
    """Split ``amount`` so that the fullest load ends as low as it can: how much each gets on top."""
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    shares = [0] * len(loads)
    for filled in range(len(order), 0, -1):
        lowest = order[:filled]
        surface, rest = divmod(amount + sum(loads[index] for index in lowest), filled)
        if surface >= loads[lowest[-1]] or filled == 1:
            for place, index in enumerate(lowest):
                shares[index] = surface + (place < rest) - loads[index]
            break
    return shares


def initial_placement(num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
    """Consecutive experts on each rank; the redundant ones, until loads are known, copy the first experts.

    Raises ConfigError when the copies cannot be spread evenly.
    """
    total = num_experts + num_redundant
    if total % num_ranks or not 0 <= num_redundant <= num_experts * (num_ranks - 1):
        raise _uneven(num_experts, num_ranks, num_redundant)
    size = total // num_ranks
    return ExpertPlacement(
        num_experts,
        tuple(tuple(copy % num_experts for copy in range(first, first + size)) for first in range(0, total, size)),
    )


def _uneven(num_experts: int, num_ranks: int, num_redundant: int) -> ConfigError:
    missing = -num_experts % num_ranks
    if missing and not num_redundant:
        fits = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        return ConfigError(
            f"expert_parallel_size: {num_ranks} ranks do not divide the model's {num_experts} experts;"
            f" {', '.join(map(str, fits))} do, or set num_redundant_experts to {missing}",
            param="expert_parallel_size",
        )
    choices = list(range(missing, num_experts * (num_ranks - 1) + 1, num_ranks))[:4]
    return ConfigError(
        f"num_redundant_experts: {num_experts} experts and {num_redundant} copies do not fill {num_ranks} ranks evenly;"
        f" {', '.join(map(str, choices))}{', ...' if len(choices) == 4 else ''} would",
        param="num_redundant_experts",
    )
