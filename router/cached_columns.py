"""From sets of replicas, as an index tells of them, to the columns of a fleet."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.ids import ReplicaId
from ..kv_store.slots import Held, ReplicaSlots
from .policy.base import Numbers

_MASKS_KEPT = 4096


class CachedColumns:
    """Writes what replicas hold into a row with a number for each of ``names``.

    The same sets come time and again, those that hold a system prompt above all, so their columns are remembered:
    a set of a thousand replicas costs no more than one of two.
    """

    def __init__(self, slots: ReplicaSlots) -> None:
        self._slots = slots
        self._versions = (-1, -1)
        self._places: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self._known: dict[int, NDArray[np.intp]] = {}

    def write(self, held: Held, row: Numbers, names: Sequence[ReplicaId], version: int) -> None:
        """Raise numbers of ``row`` to what is ``held``. ``version`` rises whenever ``names`` change."""
        if not held:
            return
        if self._versions != (self._slots.version, version):
            self._versions = (self._slots.version, version)
            self._remember(names)
        for mask, tokens in held:
            places = self._known.get(mask)
            if places is None:
                places = self._look_up(mask)
            row[places] = np.maximum(row[places], tokens)

    def _remember(self, names: Sequence[ReplicaId]) -> None:
        column = {name: place for place, name in enumerate(names)}
        places = [-1 if name is None else column.get(name, -1) for name in self._slots.names]
        self._places = np.array(places, dtype=np.intp)
        self._known.clear()

    def _look_up(self, mask: int) -> NDArray[np.intp]:
        count = len(self._places)
        packed = np.frombuffer(mask.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
        places = self._places[np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)]
        if len(self._known) >= _MASKS_KEPT:
            self._known.clear()
        self._known[mask] = places = places[places >= 0]
        return places
