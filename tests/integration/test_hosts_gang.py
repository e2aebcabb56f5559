"""A gang whose stages are on different hosts, and what becomes of it when a process, a node or a link fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from .hosts_harness import GCS_PORT, Host, HostProcess, Lan, ray_hosts, why_no_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.cluster,
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]

PROGRAM = Path(__file__).with_name("gang_over_hosts.py")


class Leader:
    """The leader of a gang, on the head host."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        head = lan.hosts[0]
        arguments = [sys.executable, str(PROGRAM), f"{head.address}:{GCS_PORT}", str(folder), str(len(lan.hosts))]
        self._process = head.start(arguments, head.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lan = lan

    def next(self, event: str) -> dict:
        """What it tells next, which must be ``event``."""
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith("{")), "")  # Ray talks too
        assert line, "the leader has ended"
        told = json.loads(line)
        assert told["event"] == event, told
        return told

    def again(self) -> None:
        """Build the gang anew."""
        assert self._process.stdin is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()

    def ranks(self) -> list[tuple[Host, HostProcess]]:
        """Those of the gang that has just become ready, in order."""
        hosts = {host.name: host for host in self._lan.hosts}
        ranks = self.next("ready")["ranks"]
        return [(hosts[rank["host"]], hosts[rank["host"]].process(rank["pid"])) for rank in ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    with ray_hosts([0, 2, 2]) as lan:
        yield lan


@pytest.fixture(scope="module")
def leader(lan: Lan, folder: Path) -> Leader:
    return Leader(lan, folder)


@pytest.mark.timeout(600)
def test_a_gang_over_hosts_is_lost_whole_and_built_anew(lan: Lan, leader: Leader, capsys):
    print_it = printer(capsys)
    ranks = leader.ranks()
    assert [host.name for host, _ in ranks] in (["host2"] * 2 + ["host3"] * 2, ["host3"] * 2 + ["host2"] * 2)

    _, process = ranks[-1]
    began = time.time()
    os.kill(process.pid, signal.SIGKILL)
    check_lost("rank killed", began, leader, ranks, print_it)

    leader.again()
    ranks = leader.ranks()
    host = ranks[-1][0]
    began = time.time()
    os.kill(host.raylet().pid, signal.SIGKILL)
    check_lost("raylet killed", began, leader, ranks, print_it)

    leader.again()
    ranks = leader.ranks()
    print_it(f"built anew after {time.time() - began:.1f} s")
    host = ranks[-1][0]
    began = time.time()
    lan.cut(host)
    check_lost("link cut", began, leader, ranks, print_it)
    time.sleep(max(0.0, began + 30.0 - time.time()))
    lan.mend(host)
    mended = time.time()
    leader.again()
    ranks = leader.ranks()
    print_it(f"built anew {time.time() - mended:.1f} s after the link was mended")


def check_lost(
    what: str, began: float, leader: Leader, ranks: list[tuple[Host, HostProcess]], print_it: Callable[[str], None]
) -> None:
    """The leader hears of it in time, no rank stays, and all that the gang held is free again."""
    pids = {process.pid for _, process in ranks}
    gone: dict[int, float] = {}
    lost = leader.next("lost")
    while time.time() < began + 60.0 and len(gone) < len(pids):
        alive = {process.pid for host, _ in ranks for process in host.processes("ray::ShardWorker")}
        gone |= {pid: time.time() for pid in pids - alive if pid not in gone}
        time.sleep(0.02)
    ended = leader.next("ended")
    print_it(
        f"{what}: noticed after {lost['at'] - began:.2f} s ({lost['error']}), last rank gone after"
        f" {max(gone.values()) - began:.2f} s, its place free after {ended['at'] - began:.2f} s"
    )
    assert len(gone) == len(pids)


def printer(capsys) -> Callable[[str], None]:
    def print_it(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    return print_it
