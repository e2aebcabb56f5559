"""From one placement of experts to another, with as few weights moved as possible."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .expert_balance import balanced_placement, improved_placement
from .expert_placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """Weights of one expert of a layer that a rank fetches from another into one of its slots.

    Ranks count within the ep group; where several groups hold parts of the same experts, all do the same moves.
    """

    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A better placement and the way to it.

    All moves read the old placement: receive into spare memory, write the slots when every send is done, and use the
    new placement from one step on in all ranks at once. Slots that no move names keep their expert.
    """

    placement: ExpertPlacement
    moves: tuple[ExpertMove, ...]
    imbalance_before: float
    imbalance_after: float


def plan_rebalance(
    placement: ExpertPlacement, loads: Sequence[float], *, goal: float = 1.05, min_gain: float = 0.05
) -> Rebalance | None:
    """A placement for these loads; None if it lowers max / mean rank load by less than ``min_gain``.

    The old placement is mended until it reaches ``goal``; one from scratch, which moves most experts, is taken only if
    it is better by ``min_gain``.
    """
    mended = _rebalance(placement, improved_placement(placement, loads, goal), loads)
    best = mended
    if mended.imbalance_after - goal >= min_gain:
        anew = balanced_placement(loads, placement.num_ranks, placement.slots_per_rank)
        if mended.imbalance_after - anew.imbalance(loads) >= min_gain:
            best = _rebalance(placement, anew, loads)
    return best if best.imbalance_before - best.imbalance_after >= min_gain else None


def _rebalance(old: ExpertPlacement, new: ExpertPlacement, loads: Sequence[float]) -> Rebalance:
    aligned = align_placement(old, new)
    return Rebalance(aligned, plan_moves(old, aligned), old.imbalance(loads), aligned.imbalance(loads))


def align_placement(old: ExpertPlacement, new: ExpertPlacement) -> ExpertPlacement:
    """``new`` with ranks and slots renamed so that the most experts stay where they are in ``old``."""
    held = [set(rank) for rank in new.slots]
    kept = [[len(set(rank) & experts) for experts in held] for rank in old.slots]
    chosen = _best_assignment(kept)
    return ExpertPlacement(
        new.num_experts,
        tuple(_keep_slots(rank, new.slots[chosen[index]]) for index, rank in enumerate(old.slots)),
    )


def plan_moves(old: ExpertPlacement, new: ExpertPlacement) -> tuple[ExpertMove, ...]:
    """What each rank must fetch: experts it lacks, each from the holder that sends the least so far."""
    copies, sent, moves = old.copies(), Counter[int](), list[ExpertMove]()
    for target, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
        for slot, expert in enumerate(after):
            if expert == before[slot]:
                continue
            copy = min(copies[expert], key=lambda number: _fetch_cost(old.rank_of(number), target, sent))
            sent[old.rank_of(copy)] += 1
            source, source_slot = divmod(copy, old.slots_per_rank)
            moves.append(ExpertMove(expert, source, source_slot, target, slot))
    return tuple(moves)


def _fetch_cost(source: int, target: int, sent: Counter[int]) -> tuple[bool, int, int]:
    """The rank itself first, then the one that sends the least."""
    return source != target, sent[source], source


def _keep_slots(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """The experts of ``new``, those that ``old`` has too in their old slots."""
    coming = iter([expert for expert in new if expert not in old])
    return tuple(expert if expert in new else next(coming) for expert in old)


def _best_assignment(gains: Sequence[Sequence[int]]) -> list[int]:
    """The column for each row, all different, with the largest sum of gains.

    The Hungarian method with potentials, O(n^3): rows are added one by one, each along a shortest augmenting path.
    """
    size = len(gains)
    row_potential, column_potential = [0.0] * (size + 1), [0.0] * (size + 1)
    row_of = [0] * (size + 1)  # row of each column, from 1; column 0 stands for the row that is being added
    for row in range(1, size + 1):
        row_of[0], column = row, 0
        slack, came_from, done = [float("inf")] * (size + 1), [0] * (size + 1), [False] * (size + 1)
        while row_of[column]:
            done[column] = True
            here = row_of[column]
            for other in range(1, size + 1):
                cost = -gains[here - 1][other - 1] - row_potential[here] - column_potential[other]
                if not done[other] and cost < slack[other]:
                    slack[other], came_from[other] = cost, column
            column = min((other for other in range(1, size + 1) if not done[other]), key=lambda other: slack[other])
            step = slack[column]
            for other in range(size + 1):
                if done[other]:
                    row_potential[row_of[other]] += step
                    column_potential[other] -= step
                else:
                    slack[other] -= step
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    columns = [0] * size
    for column in range(1, size + 1):
        columns[row_of[column] - 1] = column - 1
    return columns
