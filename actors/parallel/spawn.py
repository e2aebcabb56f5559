"""A gang's ranks as child processes on this machine, and the program that such a process runs.

A child has a connection to its parent. Whatever happens to the parent, the connection ends, and the child with it.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ...cluster.errors import ConfigError, EngineError, RankLostError, WarmrootError
from ...cluster.weights_update import NewWeights
from ..models.source import resolve_model
from .gang import Progress
from .gang_config import GangConfig, Meeting, RankReport, RankTimes, StoreAddress
from .rank import Rank

ADDRESS = "127.0.0.1"
_GRACE_S = 5.0
_TERM_S = 2.0
_TIMES, _DISCARD = "times", "discard"

logger = logging.getLogger(__name__)


class RankProcesses:
    """Implements ``Crew``."""

    address = ADDRESS

    def __init__(self, config: GangConfig, device: str = "cpu", environment: Mapping[str, str] | None = None) -> None:
        """Start the processes. With ``cuda`` each rank has the GPU of its number. ``environment`` adds variables."""
        self.config = config
        self._ended = False
        self._asking = threading.Lock()
        threads = str(config.threads_per_rank)
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": threads,  # read when OpenMP and MKL are loaded
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # the ranks share the machine's cores
            **(environment or {}),
        }
        self._children: list[_Child] = []
        try:
            for rank in range(config.topology.world_size):
                of_rank = f"cuda:{rank}" if device == "cuda" else device
                self._children.append(_Child(rank, of_rank, config.start_s, variables))
        except BaseException:
            self.kill()
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in order."""
        return [child.process.pid for child in self._children]

    def serve_store(self) -> StoreAddress:
        """See ``Crew``."""
        return self._next(self._children[:1], time.monotonic() + self.config.start_s)[1]

    def join(self, meeting: Meeting, progress: Progress) -> list[RankReport]:
        """See ``Crew``."""
        end = time.monotonic() + self.config.start_s
        for child in self._children:
            child.tell((self.config, meeting))
        loaded: dict[int, tuple[int, int]] = {}
        reports: dict[int, RankReport] = {}
        while len(reports) < len(self._children):
            child, message = self._next(self._children, end)
            if isinstance(message, RankReport):
                reports[child.rank] = message
            else:
                loaded[child.rank] = message
                progress(sum(done for done, _ in loaded.values()), sum(total for _, total in loaded.values()))
        return [reports[rank] for rank in sorted(reports)]

    def times(self) -> list[RankTimes]:
        """See ``Crew``."""
        return self._ask(_TIMES, self.config.step_s)

    def prepare(self, new: NewWeights) -> str:
        """See ``Crew``."""
        return self._ask(new, self.config.start_s)[0]

    def discard(self) -> None:
        """See ``Crew``."""
        self._ask(_DISCARD, self.config.step_s)

    def _ask(self, question: object, within_s: float) -> list[Any]:
        """What every rank answers. Raises the first error among the answers when all have come, RankLostError."""
        with self._asking:
            end = time.monotonic() + within_s
            for child in self._children:
                child.tell(question)
            answers = [self._next([child], end)[1] for child in self._children]
        for _, error in answers:
            if error is not None:
                raise error
        return [answer for answer, _ in answers]

    def kill(self) -> None:
        """See ``Crew``."""
        for child in self._children:
            child.process.kill()

    def end(self) -> None:
        """See ``Crew``."""
        if self._ended:
            return
        self._ended = True
        if not self._gone_within(_GRACE_S):
            for child in self._children:
                child.process.terminate()
            if not self._gone_within(_TERM_S):
                self.kill()
        for child in self._children:
            child.process.wait()
            child.connection.close()

    def _gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        try:
            for child in self._children:
                child.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("not all ranks have ended within %g s", seconds)
            return False
        return True

    @staticmethod
    def _next(children: "Sequence[_Child]", end: float) -> tuple["_Child", Any]:
        """What one of them says next. Raises it if it is an error, RankLostError if it is gone or none says a word."""
        by_connection = {child.connection: child for child in children}
        ready = wait(list(by_connection), max(0.0, end - time.monotonic()))
        if not ready:
            names = " and ".join(f"rank {child.rank}" for child in children)
            raise RankLostError(f"{names}: not ready in time")
        child = by_connection[ready[0]]  # pyright: ignore[reportArgumentType]
        message = child.hear()
        if isinstance(message, Exception):
            raise message
        return child, message


class _Child:
    def __init__(self, rank: int, device: str, start_s: float, variables: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        with theirs:
            fd = theirs.fileno()
            arguments = [str(fd), str(rank), device, str(start_s)]
            # The package, not this module: classes that are sent must not be those of a second copy of it.
            program = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments], pass_fds=(fd,), env=variables, stdin=subprocess.DEVNULL
            )
        self.connection = Connection(ours.detach())

    def tell(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise RankLostError(f"rank {self.rank} is gone: {error}") from error

    def hear(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):  # its connection ends a moment before it does
                self.process.wait(_TERM_S)
            code = self.process.returncode
            raise RankLostError(f"rank {self.rank} has ended, with code {code}") from None


def main(fd: str, rank: str, device: str, start_s: str) -> None:
    """Run a rank, told what to run over the connection ``fd``. Ends the process."""
    # Ctrl-C reaches all processes of a terminal; it is the parent who decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format=f"rank {rank}: %(levelname)s %(name)s: %(message)s")
    parent, code = Connection(int(fd)), 1
    try:
        _run(parent, Rank(int(rank), ADDRESS, torch.device(device)), rank, float(start_s))
        code = 0
    except EOFError:
        logger.error("the leader has ended")
    except Exception as error:
        logger.exception("the rank has failed")
        with suppress(OSError):
            parent.send(_sendable(rank, error))
    sys.stderr.flush()
    os._exit(code)  # the threads of gloo and of the store know no orderly end


def _run(parent: Connection, member: Rank, rank: str, start_s: float) -> None:
    if rank == "0":
        parent.send(member.serve_store(start_s))
    config, meeting = parent.recv()
    threading.Thread(target=_serve, args=(parent, member, rank), name="parent", daemon=True).start()
    parent.send(member.join(config, meeting, lambda done, total: parent.send((done, total))))
    member.run(_leave)


def _sendable(rank: str, error: Exception) -> WarmrootError:
    return error if isinstance(error, WarmrootError) else EngineError(f"rank {rank}: {error!r}")


def _serve(parent: Connection, member: Rank, rank: str) -> None:
    """Answer (what was asked for, error), until the connection ends: with the parent, or when it is through with this
    process.
    """
    with suppress(EOFError, OSError):
        while True:
            question = parent.recv()
            try:
                parent.send((_answer(member, question), None))
            except Exception as error:
                parent.send((None, _sendable(rank, error)))
    os._exit(1)


def _answer(member: Rank, question: object) -> object:
    if question == _TIMES:
        return member.times()
    if isinstance(question, NewWeights):
        if question.actor:
            raise ConfigError("tensors of an actor need ranks that are Ray actors", param="actor")
        return member.prepare(question.version, resolve_model(question.model, question.revision))
    return member.discard()


def _leave(error: RankLostError) -> None:
    """The main thread may hang in a collective: end without it."""
    logger.error("%s", error)
    sys.stderr.flush()
    os._exit(1)
