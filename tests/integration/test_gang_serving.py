"""A replica cut over two ranks, as a user starts it: its answers, how it is shown, and its way back after a death."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from warmroot.deploy.cli import main
from warmroot.deploy.local_ray import free_port

from .cluster_harness import processes, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]

PROMPT = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0}
FLAGS = ["--tensor-parallel-size", "2", "--dtype", "float32", "--num-kv-blocks", "80", "--max-model-len", "1024"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port, before = free_port(), processes()
    command = [str(Path(sys.executable).with_name("warmroot")), "serve", "smollm2", "--port", str(port), *FLAGS]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: server.poll() is not None or is_ready(url), 120)
        yield url
    finally:
        started = family(server.pid) - before
        server.terminate()
        assert server.wait(60) == 0
        wait_until(lambda: not started & processes(), explain=lambda: started & processes())


def family(pid: int) -> set[tuple[int, str]]:
    """The process and what it started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    parents = dict(zip(map(int, listed[::2]), map(int, listed[1::2]), strict=True))

    def descends(other: int) -> bool:
        return other == pid or (other in parents and descends(parents[other]))

    return {process for process in processes() if descends(process[0])}


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def get_replicas(url: str) -> list[dict[str, Any]]:
    state = httpx.get(url + "/admin/state", trust_env=False).json()
    return [replica for replica in state["replicas"] if replica["state"] == "ready"]


def test_it_answers_as_one_process_would(url: str):
    response = httpx.post(url + "/v1/completions", json=PROMPT | {"max_tokens": 12}, timeout=60, trust_env=False)
    assert response.json()["choices"][0]["text"] == " Paris.\n\nThe answer is: 201"


def test_its_ranks_are_shown(url: str, capsys: pytest.CaptureFixture[str]):
    wait_until(lambda: all(rank["last_step"] > 1 for rank in get_replicas(url)[0]["ranks"]))
    [replica] = get_replicas(url)
    assert [(rank["rank"], rank["stage"]) for rank in replica["ranks"]] == [(0, 0), (1, 0)]
    assert len({rank["pid"] for rank in replica["ranks"]} | {replica["pid"]}) == 3
    assert all(rank["memory_bytes"] > 2**20 for rank in replica["ranks"])
    assert main(["status", "--url", url]) == 0
    out = capsys.readouterr().out
    assert all(str(rank["pid"]) in out for rank in replica["ranks"])


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stream_waits_until_the_gang_of_a_lost_rank_is_back(url: str, loss: signal.Signals):
    [before] = get_replicas(url)
    lines: list[str] = []
    long = PROMPT | {"max_tokens": 150, "ignore_eos": True}
    expected = httpx.post(url + "/v1/completions", json=long, timeout=60, trust_env=False).json()["choices"][0]
    with httpx.stream("POST", url + "/v1/completions", json=long | {"stream": True}, timeout=120, trust_env=False) as r:
        for line in r.iter_lines():
            if not lines:
                os.kill(before["ranks"][1]["pid"], loss)
            lines += [line] if line.startswith("data: {") else []
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert choices[-1]["finish_reason"] == expected["finish_reason"] == "length"
    wait_until(lambda: [r["replica"] for r in get_replicas(url)] not in ([], [before["replica"]]), 120)
    [after] = get_replicas(url)
    assert after["epoch"] > before["epoch"]
    gone = {before["pid"], *(rank["pid"] for rank in before["ranks"])}
    wait_until(lambda: not gone & {pid for pid, _ in processes()})
    test_it_answers_as_one_process_would(url)
