"""A gang's control plane between real processes: who is killed or stopped is noticed by whoever is left."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.parallel.plan_sender import PlanSender
from warmroot.cluster.errors import RankLostError

PEER = Path(__file__).with_name("parallel_plan_peer.py")
LIMIT_S = 60.0
Process = subprocess.Popen[str]


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(*arguments: str) -> Process:
        process = subprocess.Popen([sys.executable, str(PEER), *arguments], text=True, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


class Leader:
    def __init__(self) -> None:
        self.lost = threading.Event()
        self.loss: RankLostError | None = None
        self.sender = PlanSender(2, "secret", on_lost=self._on_lost)

    def _on_lost(self, error: RankLostError) -> None:
        self.loss = error
        self.lost.set()


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.sender.close()


@pytest.fixture
def ranks(start: Callable[..., Process], leader: Leader) -> list[Process]:
    """Two ranks that have answered a plan."""
    processes = [start("rank", str(rank), *leader.sender.addresses) for rank in range(2)]
    leader.sender.accept(LIMIT_S)
    leader.sender.send(StepPlan(step=1))
    assert leader.sender.result().sequences[0].token_ids == [1]
    return processes


def said(process: Process) -> list[str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output.splitlines()


def test_ranks_end_when_the_leader_closes(leader, ranks):
    leader.sender.close()
    assert [said(rank) for rank in ranks] == [["1"], ["1"]]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert leader.loss is None


def test_a_killed_rank_is_noticed_without_any_plan_and_takes_the_gang_along(leader, ranks):
    ranks[1].kill()
    assert leader.lost.wait(LIMIT_S)
    assert "rank 1" in str(leader.loss)
    with pytest.raises(RankLostError, match="rank 1"):
        leader.sender.send(StepPlan(step=2))
    leader.sender.close()
    assert "the leader" in said(ranks[0])[-1]
    assert ranks[0].returncode == 3


def test_a_rank_killed_while_its_result_is_awaited(leader, ranks):
    ranks[0].send_signal(signal.SIGSTOP)
    leader.sender.send(StepPlan(step=2))
    threading.Timer(0.1, ranks[0].kill).start()
    with pytest.raises(RankLostError, match="rank 0"):
        leader.sender.result()


def test_a_stopped_rank_is_noticed(leader, ranks):
    ranks[1].send_signal(signal.SIGSTOP)
    assert leader.lost.wait(LIMIT_S)
    assert "rank 1 has said nothing for" in str(leader.loss)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_when_the_leader_is_killed_or_stopped(start, how):
    leader = start("leader", "2")
    assert leader.stdout is not None
    addresses = leader.stdout.readline().split()
    ranks = [start("rank", str(rank), *addresses) for rank in range(2)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "1\n"
    leader.send_signal(how)
    for rank in ranks:
        assert "the leader" in said(rank)[-1]
        assert rank.returncode == 3
