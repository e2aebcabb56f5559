"""A bad cable: copies Ethernet frames between two taps, late, with gaps, or damaged.

Kernels are often built without netem; a tap is everywhere. Run as ``python bad_link.py A B DELAY_MS JITTER_MS LOSS
SEED`` in the network namespace of a switch, as a process of its own: it says ``up`` once frames pass, and ends with its
standard input.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_MOST_BYTES = 70_000
_MOST_WAITING = 2_000
"""Frames under way; a cable that holds more has lost them."""


@dataclass(frozen=True, slots=True)
class Cable:
    """How bad it is, in each direction."""

    delay_s: float
    jitter_s: float
    """Frames come up to this much later still, but in order."""
    loss: float
    """Share of the frames that never come."""

    def arguments(self, seed: int) -> list[str]:
        """Of the command line, after the taps' names."""
        return [f"{self.delay_s * 1e3:g}", f"{self.jitter_s * 1e3:g}", f"{self.loss:g}", str(seed)]


class Forwarder:
    """Takes frames from one end to the other when they are due."""

    def __init__(self, cable: Cable, ends: tuple[int, int], draw: random.Random) -> None:
        self._cable = cable
        self._ends = ends
        self._draw = draw
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._last_due = dict.fromkeys(ends, 0.0)
        self._number = 0

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ready, _, _ = select.select([*self._ends, sys.stdin], [], [], wait)
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
                return
            for end in ready:
                if end in self._ends:
                    self._take(end)
            self._deliver()

    def _take(self, end: int) -> None:
        frame = os.read(end, _MOST_BYTES)
        if self._draw.random() < self._cable.loss or len(self._under_way) >= _MOST_WAITING:
            return
        other = self._ends[1 - self._ends.index(end)]
        late = self._cable.delay_s + self._draw.random() * self._cable.jitter_s
        due = self._last_due[other] = max(self._last_due[other], time.monotonic() + late)
        self._number += 1
        heapq.heappush(self._under_way, (due, self._number, other, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._under_way)
            with suppress(OSError):  # the other end is not plugged in
                os.write(end, frame)


def open_tap(name: str) -> int:
    """The descriptor of a tap that is made here, and gone when it is closed."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return tap


def main(names: list[str], delay_ms: str, jitter_ms: str, loss: str, seed: str) -> None:
    """Make the taps, say so, and forward."""
    taps = open_tap(names[0]), open_tap(names[1])
    cable = Cable(float(delay_ms) / 1e3, float(jitter_ms) / 1e3, float(loss))
    print("up", flush=True)
    Forwarder(cable, taps, random.Random(int(seed))).run()


if __name__ == "__main__":
    main(sys.argv[1:3], *sys.argv[3:7])
