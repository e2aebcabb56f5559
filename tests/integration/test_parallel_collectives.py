"""Collectives between real processes: right sums, noticed deaths, nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmroot.actors.kernels.library import native
from warmroot.actors.parallel.rendezvous import serve_store
from warmroot.actors.parallel.shared_memory import can_share_memory

RANK = Path(__file__).with_name("parallel_rank.py")
LIMIT_S = 60.0

needs_shared_memory = pytest.mark.skipif(not can_share_memory(native()), reason="no native library with shared memory")
Gang = list[subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Callable[..., Gang]]:
    """Starts the ranks of a case; what still runs at the end is killed."""
    store = serve_store("127.0.0.1", LIMIT_S)
    started: Gang = []

    def run(case: str, size: int) -> Gang:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        gang = [
            subprocess.Popen(
                [sys.executable, str(RANK), case, str(rank), str(size), str(store.port)],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(size)
        ]
        started.extend(gang)
        return gang

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ends_well(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors


@needs_shared_memory
def test_all_operations_are_right(start):
    for process in start("collectives", 3):
        ends_well(process)


@needs_shared_memory
def test_faults_are_named(start):
    for process in start("faults", 2):
        ends_well(process)


@needs_shared_memory
def test_the_death_of_a_rank_is_noticed(start):
    waits_in_a_sum, dies, waits_in_a_hop = start("killed", 3)
    assert dies.wait(LIMIT_S) == -signal.SIGKILL
    ends_well(waits_in_a_sum)
    ends_well(waits_in_a_hop)


@needs_shared_memory
def test_ranks_that_are_killed_leave_nothing_behind(start):
    before = traces()
    gang = start("waiting", 2)
    for process in gang:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in gang:
        process.kill()
        process.wait(LIMIT_S)
    assert traces() <= before


def traces() -> set[str]:
    """Files in shared memory, and names of our sockets."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    return {str(path) for path in Path("/dev/shm").iterdir()} | {name for name in names if "warmroot" in name}
