"""How fast a queue empties while there is one: what a prediction of waiting times stands on."""

import math

_MEMORY_S = 10.0
_TRUSTED_S = 1.0
"""Seconds of watching after which the first guess does not count any more."""
_LEAST_SHARE = 0.05
"""Of the rate, what is left for the least urgent whatever the others took: ageing lets them through in the end."""


class DrainRate:
    """Tokens per second that leave a queue, measured only while something waits: else it says what came, not what could
    have gone. Old measurements fade with the seconds watched, so they keep through quiet times. Times are any clock's.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        """By priority."""
        self._seconds = 0.0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Something waits from now on; again, this does nothing."""
        if self._since is None:
            self._since = now

    def drained(self, tokens: float, now: float, priority: int = 0) -> None:
        """So many tokens went to be computed; counted only while something waits."""
        if self._since is not None:
            self._fade(now - self._since)
            self._tokens[priority] = self._tokens.get(priority, 0.0) + tokens
            self._since = now

    def end(self, now: float) -> None:
        """Nothing waits any more."""
        if self._since is not None:
            self._fade(now - self._since)
            self._since = None

    def per_s(self, guess: float, now: float) -> float:
        """Tokens per second, above 0. ``guess`` counts until enough was seen."""
        waiting = 0.0 if self._since is None else now - self._since
        missing = max(0.0, _TRUSTED_S - self._seconds - waiting)
        seconds = self._seconds + waiting + missing
        return max(1e-3, (sum(self._tokens.values()) + missing * guess) / seconds)

    def left_for(self, priority: int) -> float:
        """The share of the rate that more urgent requests left to those of ``priority``."""
        if len(self._tokens) < 2:
            return 1.0
        urgent = sum(tokens for other, tokens in self._tokens.items() if other < priority)
        return max(_LEAST_SHARE, 1.0 - urgent / max(1e-9, sum(self._tokens.values())))

    def _fade(self, seconds: float) -> None:
        keep = math.exp(-max(0.0, seconds) / _MEMORY_S)
        self._tokens = {name: left for name, tokens in self._tokens.items() if (left := tokens * keep) > 1e-3}
        self._seconds = self._seconds * keep + max(0.0, seconds)
