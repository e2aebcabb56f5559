"""Token buckets: how much of something may be used per minute, in one process or shared by several.

A bucket holds one minute's worth and refills evenly. Whoever wants more than that waits until it is full. Its level may
fall below zero, and it is then the longer until anything can be taken again: over time no more is used than the limit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

TINY = 1e-6
"""Levels are sums of fractions: what lacks so little is there."""


class Spend(NamedTuple):
    """What is to be taken from a bucket. A negative ``cost`` is given back."""

    bucket: str
    cost: float
    per_minute: float

    def wait_s(self, level: float) -> float:
        """Seconds until it can be taken from a bucket that has ``level`` now."""
        lacking = min(self.cost, self.per_minute) - level
        return lacking * 60.0 / self.per_minute if lacking > TINY else 0.0


class Spent(NamedTuple):
    """What became of it."""

    done: bool
    """Everything was taken, or else nothing."""
    levels: list[float]
    """Of each bucket, afterwards."""
    waits_s: list[float]
    """For each bucket, until it has enough; 0 where it had."""


class QuotaStore(Protocol):
    """Where buckets are kept. Raises ConnectionError when that cannot be reached."""

    async def spend(self, spends: Sequence[Spend], *, force: bool = False) -> Spent:
        """Take from all buckets, or from none if one has too little. ``force`` takes in any case."""
        ...


class LocalQuota:
    """``QuotaStore`` in this process. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}
        """By bucket: its level, and when it had that."""

    async def spend(self, spends: Sequence[Spend], *, force: bool = False) -> Spent:
        """See ``QuotaStore``."""
        now = self._clock()
        levels = [self._level(spend, now) for spend in spends]
        waits = [0.0 if force else spend.wait_s(level) for spend, level in zip(spends, levels, strict=True)]
        if any(waits):
            return Spent(False, levels, waits)
        levels = [min(spend.per_minute, level - spend.cost) for spend, level in zip(spends, levels, strict=True)]
        self._levels.update((spend.bucket, (level, now)) for spend, level in zip(spends, levels, strict=True))
        return Spent(True, levels, waits)

    def _level(self, spend: Spend, now: float) -> float:
        level, at = self._levels.get(spend.bucket, (spend.per_minute, now))
        return min(spend.per_minute, level + (now - at) * spend.per_minute / 60.0)
