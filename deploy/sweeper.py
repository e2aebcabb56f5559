"""Ends what is left of a local cluster when the process that started it is gone, however it went.

    python -I sweeper.py FOLDER PID

waits until process PID is no longer its parent, or FOLDER is gone. Only the standard library: it starts at once.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "WARMROOT_CLUSTER"
"""Every process of a local cluster has this variable, with the cluster's folder in it."""
FOLDERS = "wr-{pid}-"
"""How the name of the folder begins that process PID made."""
_WATCH_S = 0.2
_KILL_S = 10.0


def sweep(folder: Path) -> None:
    """Kill the cluster's processes, and remove its folder. Whoever starts more of them meanwhile is killed too."""
    deadline = time.monotonic() + _KILL_S
    while (members := _members(folder)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def sweep_stale(parent: Path) -> None:
    """Sweep the folders in ``parent`` whose makers are gone: their sweepers were killed with them."""
    for folder in parent.glob(FOLDERS.format(pid="*") + "*"):
        with suppress(OSError, ValueError):
            if folder.stat().st_uid == os.getuid() and not Path(f"/proc/{int(folder.name.split('-')[1])}").exists():
                sweep(folder)


def watch(folder: Path) -> None:
    """Start a process that sweeps once this one is gone. It has a session of its own: no signal to ours reaches it."""
    arguments = [sys.executable, "-I", __file__, str(folder), str(os.getpid())]
    silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.posix_spawn(sys.executable, arguments, environment, setsid=True, file_actions=silence)


def _members(folder: Path) -> list[int]:
    """Marked processes, and children of such that have lost the mark by writing their title over it."""
    mark = f"{MARK}={folder}".encode()
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z":
                continue
            parents[int(process.name)] = int(parent)
            if mark in (process / "environ").read_bytes().split(b"\0"):
                marked.add(int(process.name))
    children = {pid for pid, parent in parents.items() if parent in marked}
    return sorted((marked | children) - {os.getpid()})


def main() -> None:
    """See the module."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    while os.getppid() == parent and folder.exists():
        time.sleep(_WATCH_S)
    sweep(folder)


if __name__ == "__main__":
    main()
