"""When a peer that says nothing is gone."""

from collections.abc import Callable

PING_S = 0.5
"""A client asks so often, and a replica answers at once."""
LEAST_S = 2.0
MOST_S = 10.0
PATIENCE = 4.0
"""A peer may be silent so many times longer than its slowest answer of late took."""
_FADE = 0.95


class Silence:
    """How long one peer has said nothing, against what it may: between LEAST_S and MOST_S, more for a busy one.

    A process that is held up itself does not take that for its peer's silence: only time in which it could have heard
    something counts. ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: float | None = None
        self._slowest_s = 0.0
        self._silent_s = 0.0

    @property
    def limit_s(self) -> float:
        """Silence that is too long."""
        return min(MOST_S, max(LEAST_S, PATIENCE * self._slowest_s))

    def asked(self) -> None:
        """The peer was asked for a word; while it owes one this changes nothing."""
        if self._asked is None:
            self._asked = self._clock()

    def heard(self) -> None:
        """A word has come."""
        self._silent_s = 0.0
        if self._asked is not None:
            self._slowest_s = max(_FADE * self._slowest_s, self._clock() - self._asked)
            self._asked = None

    def too_long(self, seconds: float) -> bool:
        """Call it every ``seconds``, late or not: whether the peer is gone."""
        self._silent_s += seconds
        return self._silent_s > self.limit_s
