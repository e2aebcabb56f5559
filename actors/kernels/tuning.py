"""Which kernels multiply float16 weights: the own ones or FBGEMM's, by measurement on this machine.

Which is faster depends on the CPU and on the number of rows, so both are timed once on a model's largest shape, for
four classes of row counts, and the outcome is kept on disk.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import torch

from ..layers.linear import Linear, PackedHalfMethod
from .library import native
from .linear import NativeLinear, NativeMethod, WeightFormat

ROWS = (1, 8, 32, 256)
"""Rows that stand for their class."""
_BOUNDS = (1, 16, 64)
"""Largest number of rows of each class but the last."""
_GAIN = 1.1
"""How much faster FBGEMM must be to be chosen: where both are, the weights are in memory twice."""
_LARGEST = 3 << 22
"""Values of the weight that is timed: two copies do not fit into the caches, and a call takes milliseconds."""
_REPEATS = 5

Timer = Callable[[Sequence[Linear], torch.Tensor], Sequence[float]]
"""Seconds that each linear takes for an input."""


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Per class of rows (1, 2-16, 17-64, more): whether the own kernels multiply."""

    own: tuple[bool, bool, bool, bool] = (True, True, True, True)

    def is_own(self, rows: int) -> bool:
        """For a batch of so many rows."""
        return self.own[sum(rows > bound for bound in _BOUNDS)]


class ChoosingLinear(Linear):
    """One weight packed for two kernels, where each is clearly faster for some row counts."""

    def __init__(self, own: NativeLinear, other: Linear, choice: LinearChoice) -> None:
        self.own = own
        self.choice = choice
        self._other = other

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.apply``."""
        return (self.own if self.choice.is_own(x.shape[0]) else self._other).apply(x)


def choose_linears(shapes: Sequence[tuple[int, int]], folder: Path) -> LinearChoice:
    """The choice for a model whose linears have these shapes (out_features, in_features).

    Remembered in ``folder`` for this CPU, these libraries and this number of threads; else measured, in half a second.
    """
    library = native()
    if library is None or not PackedHalfMethod.is_available():
        return LinearChoice()
    out_features, in_features = max(shapes, key=lambda shape: shape[0] * shape[1])
    shape = (min(out_features, max(16, _LARGEST // in_features)), in_features)
    facts = (_cpu_model(), library.name, library.num_threads, torch.__version__, version("warmroot"), shape)
    path = folder / f"linears-{blake2b(repr(facts).encode(), digest_size=8).hexdigest()}.json"
    remembered = _read(path)
    if remembered is not None:
        return remembered
    choice = measure(shape, seconds)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"facts": facts, "own": choice.own}), encoding="utf-8")
    return choice


def measure(shape: tuple[int, int], timer: Timer) -> LinearChoice:
    """Time both kernels on one weight [out_features, in_features]."""
    weight = torch.zeros(shape)
    linears = (NativeMethod(WeightFormat.F16).prepare(weight, None), PackedHalfMethod().prepare(weight, None))
    times = [timer(linears, torch.zeros(rows, shape[1])) for rows in ROWS]
    one, few, some, many = (own < other * _GAIN for own, other in times)
    return LinearChoice((one, few, some, many))


def seconds(linears: Sequence[Linear], x: torch.Tensor) -> list[float]:
    """The fastest of a few calls of each: what disturbs a call only ever makes it slower.

    They take turns, so each finds its weight out of the caches, as in a model.
    """
    best = [math.inf] * len(linears)
    for _ in range(_REPEATS):
        for index, linear in enumerate(linears):
            start = time.perf_counter()
            linear.apply(x)
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def _read(path: Path) -> LinearChoice | None:
    """None if there is none or it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        one, few, some, many = map(bool, json.loads(path.read_text(encoding="utf-8"))["own"])
        return LinearChoice((one, few, some, many))
    return None


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
