"""Counts what goes over the wire, and how long that takes, by kind of operation."""

import threading
from collections import Counter, defaultdict
from typing import Literal

Kind = Literal["all_reduce", "all_gather", "broadcast", "hop", "counts", "all_to_all", "plan", "result"]
"""``hop``: hidden states between pipeline stages. ``counts`` go ahead of the rows of an ``all_to_all``."""


class Traffic:
    """Payload bytes that one process has put into each kind of operation, and how many operations there were.

    What a transport adds (headers, a ring's repeated sends) is not counted: an all-reduce or broadcast counts its
    tensor once, an all-gather the rank's own part, a gather the same but nothing where it ends, an all-to-all the rows
    for other ranks, a plan once per receiver.
    """

    def __init__(self) -> None:
        self.num_bytes: Counter[Kind] = Counter()
        self.num_calls: Counter[Kind] = Counter()
        self.seconds: defaultdict[Kind, float] = defaultdict(float)
        """Spent in them, waiting for others included; but not in waiting for hidden states."""
        self._lock = threading.Lock()

    def add(self, kind: Kind, num_bytes: int, num_calls: int = 1) -> None:
        """So many operations of ``num_bytes`` each. Thread-safe."""
        with self._lock:
            self.num_bytes[kind] += num_calls * num_bytes
            self.num_calls[kind] += num_calls

    def spend(self, kind: Kind, seconds: float) -> None:
        """Time that passed in an operation. Thread-safe."""
        with self._lock:
            self.seconds[kind] += seconds

    def clear(self) -> None:
        """Start again at 0."""
        with self._lock:
            self.num_bytes.clear()
            self.num_calls.clear()
            self.seconds.clear()
