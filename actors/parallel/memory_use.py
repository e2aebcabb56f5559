"""What a rank's process holds in RAM, as the kernel counts it.

Resident memory alone misleads: packed weights are mapped from a file and KV memory is reserved, and the pages of both
are only counted once they have been touched.
"""

import resource
from pathlib import Path

_PROC = Path("/proc/self")


def held_bytes(proc: Path = _PROC) -> int:
    """Private memory of this process now, and the whole of the files that it has mapped for reading by all."""
    try:
        return _status(proc, "RssAnon:") + _mapped_files(proc)
    except OSError:  # no Linux
        return _peak_of_usage()


def peak_bytes(expected: int, proc: Path = _PROC) -> int:
    """Most that this program has held, or will hold when it holds what is ``expected`` of it."""
    try:
        return max(expected, _status(proc, "VmHWM:"))
    except OSError:  # no Linux, where the other number would count what the parent held before it started this
        return max(expected, _peak_of_usage())


def _status(proc: Path, name: str) -> int:
    lines = (proc / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _mapped_files(proc: Path) -> int:
    """Shared, read-only mappings: packed weights. Libraries are mapped privately, and a group shares what it writes."""
    total = 0
    for line in (proc / "maps").read_text().splitlines():
        addresses, rights, _, _, inode = line.split(maxsplit=5)[:5]
        if rights == "r--s" and inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            total += end - start
    return total


def _peak_of_usage() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
