"""Ranks as real processes that are forked from one which has imported everything: a gang starts in no time."""

import multiprocessing
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from warmroot.actors.parallel import rank, spawn
from warmroot.actors.parallel.plan_receiver import PlanReceiver

PATIENCE_S = 60.0
"""The machine may have much else to do, and these tests are not about ranks that are lost."""


def run(connection: Connection, *arguments: str) -> None:
    """In the child."""
    rank.PlanReceiver = partial(PlanReceiver, silence_s=PATIENCE_S)
    spawn.main(str(connection.fileno()), *arguments)


class Forked:
    """What ``RankProcesses`` wants of a ``Popen``."""

    def __init__(self, connection: Connection, *arguments: str) -> None:
        self._process = multiprocessing.get_context("forkserver").Process(
            target=run, args=(connection, *arguments), daemon=True
        )
        self._process.start()
        self.pid, self.kill, self.terminate = self._process.pid, self._process.kill, self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)


class ForkedChild(spawn._Child):
    def __init__(self, rank: int, device: str, start_s: float, variables) -> None:
        self.rank = rank
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = Forked(theirs, str(rank), device, str(start_s))


@contextmanager
def forked_ranks():
    """``RankProcesses`` started within have forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(spawn, "_Child", ForkedChild)
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setattr(run, "__module__", Path(__file__).stem)  # by which the child imports it
        multiprocessing.set_forkserver_preload([spawn.__name__])
        patch.setitem(sys.modules, Path(__file__).stem, sys.modules[__name__])
        yield
