"""How many drafted tokens are worth their time.

Tokens per second are the expected tokens of a step over its expected seconds. A place of a draft, or a node of a tree,
brings as many tokens as it was right on average, and takes the seconds of one more row; so it pays exactly if that
exceeds what the step would make in that time otherwise (Dinkelbach, "On nonlinear fractional programming", 1967). Step
times are learnt as they are measured, so this also knows when rows cost nothing (weights are read once for all of them)
and when they cost in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROWS, _PASSES = 64.0, 8.0
"""Scale of the features: what was not measured yet is thought of as cheap, and tried."""
_DOWN, _UP = 0.3, 0.03
"""Share of a new measurement in its average, where it is lower and where not: what disturbs a step makes it slower."""
_SURPRISE = 0.8
_FADING = 0.998
_SOLVED_STEPS = 8
"""Steps that costs hold for: to solve for them takes as long as a small draft."""
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


class _Solved(NamedTuple):
    near: int
    shapes: int
    """That had been measured."""
    until: int
    costs: tuple[float, float, float]


class StepSeconds:
    """Seconds of a step as base + rows · per_row + passes · per_pass, near a number of rows.

    Each shape has an average of its own, which fades slowly: a long run of one shape does not make the others unknown.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[int, int], _Average] = {}
        """By (rows rounded, passes)."""
        self._now = 0
        self._solved: _Solved | None = None

    def record(self, shape: StepShape, seconds: float) -> bool:
        """A step that took so long; whether that is much less than such steps were thought to take."""
        self._now += 1
        key = (round(8 * log2(shape.rows)), shape.passes)
        seconds = min(seconds, self._most(shape, key))
        average = self._measured.setdefault(key, _Average(shape.rows, seconds, self._now))
        surprises = seconds < _SURPRISE * average.seconds
        average.add(shape.rows, seconds, self._now)
        return surprises

    def _most(self, shape: StepShape, key: tuple[int, int]) -> float:
        """What it would take row by row, each pass as long as one: more than that is a disturbance."""
        smaller = (average for other, average in self._measured.items() if other < key)
        return min((a.seconds * (shape.rows / a.rows + shape.passes) for a in smaller), default=inf)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._measured)

    def costs(self, near: int) -> tuple[float, float, float]:
        """(base, per row, per pass) in seconds, none negative, of steps of about ``near`` rows."""
        solved, shapes = self._solved, len(self._measured)
        if solved is None or (solved.near, solved.shapes) != (near, shapes) or self._now >= solved.until:
            self._solved = solved = _Solved(near, shapes, self._now + _SOLVED_STEPS, self._solve(near))
        return solved.costs

    def _solve(self, near: int) -> tuple[float, float, float]:
        found = [(average, passes) for (_, passes), average in self._measured.items()]
        features: Floats = np.array([(1.0, average.rows / _ROWS, passes / _PASSES) for average, passes in found])
        seconds: Floats = np.array([average.seconds for average, _ in found])
        weights: Floats = np.array([self._weight(average.rows / near, average.when) for average, _ in found])
        # Where steps do not tell the three apart, the smallest numbers that explain them are taken.
        solved, *_ = np.linalg.lstsq(features * weights[:, None], seconds * weights, rcond=1e-4)
        base, per_row, per_pass = np.maximum(solved / (1.0, _ROWS, _PASSES), 0.0).tolist()
        return base, per_row, per_pass

    def _weight(self, distance: float, when: int) -> float:
        """Of an equation: what is old or of another size counts less."""
        return sqrt(_FADING ** (self._now - when) / (1.0 + log2(distance) ** 2))


class Place(NamedTuple):
    """What a place of a draft is expected to be."""

    tokens: float
    """That it brings."""
    rows: float = 1.0
    """That it takes: less than one where often nothing is drafted there."""


class DraftLengths(NamedTuple):
    """What to draft."""

    lengths: list[int]
    """Tokens for each sequence."""
    row: float
    """Tokens that a row would bring elsewhere: a guess less likely than that is not worth its time."""


def draft_lengths(
    places: Sequence[Sequence[Place]], rows: int, costs: tuple[float, float, float], *, most_passes: int
) -> DraftLengths:
    """For each sequence by the first, second … place of its draft, none of which brings more than the one before.

    ``rows`` decodes run in the step anyway. Each further place takes a pass over all sequences, up to ``most_passes``.
    """
    base, per_row, per_pass = costs
    lengths, row = [0] * len(places), 0.0
    tokens, seconds = float(rows), base + per_row * rows
    for _ in range(_ROUNDS):
        if seconds <= 0.0:
            return DraftLengths([len(own) for own in places], 0.0)
        rate = tokens / seconds
        row = rate * per_row
        lengths = _worth(places, row, rate * per_pass, most_passes)
        drafted = [place for own, length in zip(places, lengths, strict=True) for place in own[:length]]
        tokens = rows + sum(place.tokens for place in drafted)
        passes = min(max(lengths, default=0), most_passes)
        seconds = base + per_row * (rows + sum(place.rows for place in drafted)) + per_pass * passes
    return DraftLengths(lengths, row)


def _worth(places: Sequence[Sequence[Place]], row: float, one_pass: float, most_passes: int) -> list[int]:
    """Lengths whose every place gains more tokens than its row and its pass would bring elsewhere."""
    best, best_gain, gain = 0, 0.0, -1e-9
    for index in range(max(map(len, places), default=0)):
        gain += sum(max(0.0, _gain(own[index], row)) for own in places if index < len(own))
        if index < most_passes:
            gain -= one_pass
        if gain > best_gain:
            best, best_gain = index + 1, gain
    return [sum(1 for place in own[:best] if _gain(place, row) > 0.0) for own in places]


def _gain(place: Place, row: float) -> float:
    return place.tokens - row * place.rows
