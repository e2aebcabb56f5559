"""Fills a host's disk, or the machine's memory up to a bound, or says that memory is full.

Run as ``python ballast.py disk FOLDER`` or ``python ballast.py memory BYTES`` there: it says ``up`` once there is no
room, and gives it back at the end of its standard input.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..integration.hosts_harness import Host

DISK, MEMORY = "disk", "memory"
MEMORY_BYTES = 1536 * 2**20
_PIECE = 2**20


def start_ballast(host: "Host", what: str) -> Callable[[], None]:
    """Fill it; what is returned empties it again."""
    amount = str(host.scratch) if what == DISK else str(MEMORY_BYTES)
    return _until_called(host, [sys.executable, str(Path(__file__)), what, amount])


def _until_called(host: "Host", command: list[str]) -> Callable[[], None]:
    """Run a command that says ``up`` and ends with its standard input, which what is returned closes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = host.start(command, os.environ, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20.0)

    return end


# The file is in memory: the disk may be full.
_PRETEND = """
file=/dev/shm/meminfo
sed '/^MemAvailable/s/[0-9]\\{1,\\}/100000/' /proc/meminfo > $file && mount --bind $file /proc/meminfo && echo up
cat >/dev/null; umount /proc/meminfo; rm $file
"""


def pretend_full_memory(host: "Host") -> Callable[[], None]:
    """The kernel tells the host's processes that there is next to no memory left, until what is returned is called."""
    return _until_called(host, ["sh", "-c", _PRETEND])


def fill_disk(folder: Path) -> Callable[[], None]:
    """Until it has no room at all."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * _PIECE)
    return path.unlink


def fill_memory(amount: int) -> Callable[[], None]:
    """Take so many bytes, and touch them."""
    pieces = [bytearray(b"\1" * _PIECE) for _ in range(amount // _PIECE)]
    return pieces.clear


def main(what: str, amount: str) -> None:
    """Fill, say so, and wait."""
    empty = fill_disk(Path(amount)) if what == DISK else fill_memory(int(amount))
    print("up", flush=True)
    sys.stdin.read()
    empty()


if __name__ == "__main__":
    main(*sys.argv[1:])
