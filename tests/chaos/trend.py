"""Whether a figure is the same at the end of a long run as at its beginning."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 0.2
"""Share of the samples, at the beginning, that do not count: caches and pools fill."""
MOST_GROWTH = 0.02
MOST_NEW_DESCRIPTORS = 2.0
"""By the fit, over the whole run, for each process."""
MOST_SLOWER = 1.25
"""Median of the last third over that of the first."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Linear fit of samples at equal distances, without those of the warm-up."""

    first: float
    """Of the fit, where it begins."""
    last: float

    @property
    def change(self) -> float:
        """In the samples' unit."""
        return self.last - self.first

    @property
    def growth(self) -> float:
        """As a share of the beginning."""
        return self.change / self.first if self.first else 0.0


def fit(samples: Sequence[float]) -> Trend:
    """Least squares. Fewer than two samples have no slope."""
    settled = settle(samples)
    if len(settled) < 2:
        return Trend(settled[0], settled[0]) if settled else Trend(0.0, 0.0)
    line = statistics.linear_regression(range(len(settled)), settled)
    return Trend(line.intercept, line.intercept + line.slope * (len(settled) - 1))


def slower(samples: Sequence[float]) -> float:
    """How much higher the last third is than the first, by medians."""
    settled = settle(samples)
    third = max(1, len(settled) // 3)
    first = statistics.median(settled[:third]) if settled else 0.0
    return statistics.median(settled[-third:]) / first if first else 1.0


def settle(samples: Sequence[float]) -> Sequence[float]:
    """Those after the warm-up."""
    return samples[int(len(samples) * WARM_UP) :]
