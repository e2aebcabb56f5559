"""CPU time of a local cluster's processes, from /proc, by the part they play."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_SERVE_REPLICA = re.compile(r"ServeReplica:[^:]*:(\w+)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds_by_role(root: int, leave_out: int | None = None) -> dict[str, float]:
    """User and system seconds of all living descendants of process ``root``, summed by role.

    Itself does not count, nor does child ``leave_out`` with its own descendants.
    """
    seconds: dict[str, float] = {}
    for pid in _descendants(root, leave_out):
        try:
            role, used = role_of(_command(pid)), _cpu_seconds(pid)
        except OSError:  # it has just ended
            continue
        seconds[role] = seconds.get(role, 0.0) + used
    return seconds


def role_of(command: str) -> str:
    """``ingress``, ``replica``, ``haproxy``, ``serve`` (controller and proxies) or ``ray`` (everything else of Ray)."""
    deployment = _SERVE_REPLICA.search(command)
    if deployment is not None:
        return deployment[1].lower()
    program = os.path.basename(command.split(" ", 1)[0])
    if program.startswith("haproxy"):
        return "haproxy"
    if command.startswith(("ray::ServeController", "ray::ProxyActor", "ray::HAProxy")):
        return "serve"
    return "ray"


def _descendants(root: int, leave_out: int | None) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_stat_fields(int(entry.name))[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        if pid == leave_out:
            continue
        yield pid
        waiting += children.get(pid, ())


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _cpu_seconds(pid: int) -> float:
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, state first (proc(5) counts it as field 3)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
