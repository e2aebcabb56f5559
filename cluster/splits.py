"""Cutting a range into consecutive parts: evenly, by share, or so that the costliest part is cheapest."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

_Step = Callable[[int, int, int, float], float]
"""(part, begin, end, total of the parts before) -> total."""


def split_evenly(total: int, parts: int) -> list[range]:
    """Parts that differ by at most one, the longer ones first."""
    size, longer = divmod(total, parts)
    return _ranges([size + (part < longer) for part in range(parts)])


def split_by_share(total: int, shares: Sequence[float], unit: int = 1) -> list[range]:
    """Whole units to each part, at least one, about as ``shares`` say; ``unit`` divides ``total``."""
    units, whole = total // unit, sum(shares)
    wanted = [units * share / whole for share in shares]
    sizes = [max(1, int(want)) for want in wanted]
    while sum(sizes) > units:
        sizes[max((part for part, size in enumerate(sizes) if size > 1), key=lambda p: sizes[p] - wanted[p])] -= 1
    while sum(sizes) < units:
        sizes[max(range(len(sizes)), key=lambda part: (wanted[part] - sizes[part], -part))] += 1
    return _ranges([size * unit for size in sizes])


def split_by_cost(costs: Sequence[float], parts: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Consecutive parts of items, none empty, the costliest as cheap as can be, and then as equal as can be.

    ``first`` and ``last`` are costs that the first and the last part have besides their items'.
    """
    sums = [0.0, *accumulate(costs)]

    def cost(part: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + first * (part == 0) + last * (part == parts - 1)

    peak = _fold(len(costs), parts, lambda part, begin, end, before: max(before, cost(part, begin, end)))[0]
    limit = peak * (1 + 1e-12)

    def square(part: int, begin: int, end: int, before: float) -> float:
        value = cost(part, begin, end)
        return before + value * value if value <= limit else float("inf")

    return _fold(len(costs), parts, square)[1]


def _fold(items: int, parts: int, step: _Step) -> tuple[float, list[range]]:
    """Lowest total over all splits, by dynamic programming, and the split; later cuts win ties."""
    best: list[tuple[float, list[int]]] = [(0.0, [0])] + [(float("inf"), [0])] * items
    for part in range(parts):
        following: list[tuple[float, list[int]]] = [(float("inf"), [0])] * (items + 1)
        for end in range(part + 1, items - (parts - 1 - part) + 1):
            following[end] = min(
                ((step(part, begin, end, best[begin][0]), [*best[begin][1], end]) for begin in range(part, end)),
                key=lambda found: (found[0], [-cut for cut in found[1]]),
            )
        best = following
    value, cuts = best[items]
    return value, [range(*ends) for ends in pairwise(cuts)]


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*ends) for ends in pairwise([0, *accumulate(sizes)])]
