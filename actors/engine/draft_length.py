"""How many drafted tokens are worth their time.

Tokens per second are the expected tokens of a step over its expected seconds. A draft's place ``i`` adds ``a**i`` of a
token, where ``a`` is how often drafts of its sequence were accepted, and takes the seconds of one more row; so it pays
exactly if ``a**i`` exceeds what the step would make in that time otherwise (Dinkelbach, "On nonlinear fractional
programming", 1967). Step times are learnt as they are measured, so this also knows when rows cost nothing (weights are
read once for all of them) and when they cost in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROWS, _PASSES = 64.0, 8.0
"""Scale of the features: what was not measured yet is thought of as cheap, and tried."""
_DOWN, _UP = 0.3, 0.03
"""Share of a new measurement in its average, where it is lower and where not: what disturbs a step makes it slower."""
_FADING = 0.998
_ROUNDS = 3
"""The rate converges from below, quadratically."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how long a step of decodes takes."""

    rows: int
    """Tokens computed, drafted ones included."""
    passes: int
    """Passes of the drafting layers after it."""


@dataclass(slots=True)
class _Average:
    rows: float
    seconds: float
    when: int

    def add(self, rows: int, seconds: float, when: int) -> None:
        self.rows += _DOWN * (rows - self.rows)
        self.seconds += (_UP if seconds > self.seconds else _DOWN) * (seconds - self.seconds)
        self.when = when


class StepSeconds:
    """Seconds of a step as base + rows · per_row + passes · per_pass, near a number of rows.

    Each shape has an average of its own, which fades slowly: a long run of one shape does not make the others unknown.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[int, int], _Average] = {}
        """By (rows rounded, passes)."""
        self._now = 0

    def record(self, shape: StepShape, seconds: float) -> None:
        """A step that took so long."""
        self._now += 1
        key = (round(8 * log2(shape.rows)), shape.passes)
        average = self._measured.setdefault(key, _Average(shape.rows, seconds, self._now))
        average.add(shape.rows, seconds, self._now)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._measured)

    def costs(self, near: int, trust: float = 1.0) -> tuple[float, float, float]:
        """(base, per row, per pass) in seconds, none negative, of steps of about ``near`` rows.

        With less ``trust`` in what was measured, more than that costs less.
        """
        found = [(average, passes) for (_, passes), average in self._measured.items()]
        features: Floats = np.array([(1.0, average.rows / _ROWS, passes / _PASSES) for average, passes in found])
        seconds: Floats = np.array([average.seconds for average, _ in found])
        weights: Floats = np.array([self._weight(average.rows / near, average.when) for average, _ in found])
        # Where steps do not tell the three apart, the smallest numbers that explain them are taken.
        solved, *_ = np.linalg.lstsq(features * weights[:, None], seconds * weights, rcond=1e-4)
        base, per_row, per_pass = np.maximum(solved / (1.0, _ROWS, _PASSES), 0.0).tolist()
        return base + near * per_row * (1.0 - trust), per_row * trust, per_pass * trust

    def _weight(self, distance: float, when: int) -> float:
        """Of an equation: what is old or of another size counts less."""
        return sqrt(_FADING ** (self._now - when) / (1.0 + log2(distance) ** 2))


def draft_lengths(
    acceptances: Sequence[float], rows: int, most: int, costs: tuple[float, float, float], *, by_passes: bool
) -> list[int]:
    """Tokens to draft for each sequence, by how often its drafts are accepted.

    ``rows`` decodes run in the step anyway. ``by_passes``: each further token takes a pass over all sequences.
    """
    base, per_row, per_pass = costs
    if not by_passes:
        per_pass = 0.0
    lengths = [0] * len(acceptances)
    tokens, seconds = float(rows), base + per_row * rows
    for _ in range(_ROUNDS):
        if seconds <= 0.0:
            return [most] * len(acceptances)
        rate = tokens / seconds
        lengths = _worth(acceptances, most, rate * per_row, rate * per_pass)
        tokens = rows + sum(_expected(a, length) for a, length in zip(acceptances, lengths, strict=True))
        seconds = base + per_row * (rows + sum(lengths)) + per_pass * max(lengths, default=0)
    return lengths


def _worth(acceptances: Sequence[float], most: int, row: float, one_pass: float) -> list[int]:
    """Lengths whose every place gains more tokens than its row and its pass would bring elsewhere."""
    best, best_gain, gain = 0, 0.0, -1e-9
    for place in range(1, most + 1):
        gain += sum(max(0.0, a**place - row) for a in acceptances) - one_pass
        if gain > best_gain:
            best, best_gain = place, gain
    return [_places(a, best, row) for a in acceptances]


def _places(acceptance: float, most: int, row: float) -> int:
    length = 0
    while length < most and acceptance ** (length + 1) > row:
        length += 1
    return length


def _expected(acceptance: float, length: int) -> float:
    """Accepted tokens of a draft."""
    return sum(acceptance**place for place in range(1, length + 1))
