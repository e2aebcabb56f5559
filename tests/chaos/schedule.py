"""Which fault strikes when: the same for a seed, whatever happens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .faults import Fault


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come."""

    at_s: float
    """From the beginning."""
    fault: Fault
    seed: str
    """Of the draws by which it finds its victim."""


def schedule(seed: int, faults: Sequence[Fault], *, seconds: float, every_s: float) -> list[Planned]:
    """All faults in random order, then all in another, one ``every_s`` or so, and quiet at the end.

    Fewer moments than faults take some of them; which, depends on the seed.
    """
    draw = random.Random(seed)
    moments = [every_s * (number + 0.5) for number in range(int(seconds / every_s))]
    order: list[Fault] = []
    while len(order) < len(moments):
        order += draw.sample(faults, len(faults))
    return [
        Planned(moment + (draw.random() - 0.5) * every_s / 2, fault, f"{seed} {number}")
        for number, (moment, fault) in enumerate(zip(moments, order, strict=False))
    ]
