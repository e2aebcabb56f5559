"""Histograms as Prometheus counts them: how many values fell under each bound, and their sum."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """What a ``Histogram`` has counted. ``counts`` has one entry more than ``bounds``: what is above them all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """Sum of the values."""

    @property
    def num_values(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it) as Prometheus writes them, the last one ``+Inf``."""
        found: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            below += count
            found.append(("+Inf" if bound is None else str(float(bound)), below))
        return found


def merged(bounds: tuple[float, ...], parts: Iterable[HistogramCounts]) -> HistogramCounts:
    """All of ``parts`` together, which have these bounds; without any, nothing was counted."""
    counts, total = [0] * (len(bounds) + 1), 0.0
    for part in parts:
        counts = [one + other for one, other in zip(counts, part.counts, strict=True)]
        total += part.total
    return HistogramCounts(bounds, tuple(counts), total)


class Histogram:
    """Counts values under ``bounds``, which rise. A value that equals a bound is under it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """One value more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> HistogramCounts:
        """What there is so far."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
