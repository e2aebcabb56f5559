"""A running cluster as the tests see it, and the processes that it consists of."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import warmroot
from warmroot.router.openai.cluster_state import ReplicaState, ReplicaStatus


@dataclass(frozen=True)
class Cluster:
    """The running cluster."""

    handle: warmroot.Handle
    url: str
    ray_address: str

    def replicas(self) -> list[ReplicaStatus]:
        """Those that can be given a request, as this process's handle sees them."""
        return [replica for replica in self.handle.replicas() if replica.state is ReplicaState.READY]

    def wait_idle(self, deadline_s: float = 30.0) -> None:
        """Until no replica holds a request or a block. Replicas tell their load at least every two seconds."""
        wait_until(lambda: all(_idle(replica) for replica in self.handle.replicas()), deadline_s, self.handle.replicas)

    def environment(self) -> dict[str, str]:
        """For a process that joins the cluster's Ray."""
        return {**os.environ, "RAY_ADDRESS": self.ray_address, "WARMROOT_URL": self.url}


def _idle(replica: ReplicaStatus) -> bool:
    return (replica.load.running, replica.load.waiting, replica.load.kv_used_blocks) == (0, 0, 0)


def wait_until(
    condition: Callable[[], bool], deadline_s: float = 30.0, explain: Callable[[], object] = lambda: "timed out"
) -> None:
    """Poll; fails with ``explain()`` after ``deadline_s`` seconds."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


Process = tuple[int, str]
"""Process id and the time it started, for ids are used again."""


def processes() -> set[Process]:
    """Every process that runs."""
    return {(pid, started) for pid, _, started in _table()}


def descendants(of: int | None = None) -> set[Process]:
    """Children of a process, by default this one, and theirs."""
    table = _table()
    ancestor = os.getpid() if of is None else of
    family = {ancestor}
    while True:
        grown = family | {pid for pid, parent, _ in table if parent in family}
        if grown == family:
            return {(pid, started) for pid, _, started in table if pid in family and pid != ancestor}
        family = grown


def _table() -> list[tuple[int, int, str]]:
    """(pid, parent, start time) of every process that is not a zombie."""
    rows: list[tuple[int, int, str]] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in parentheses, may hold spaces.
            state, parent, *rest = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                rows.append((int(stat.parent.name), int(parent), rest[17]))
    return rows
