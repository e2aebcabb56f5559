"""The closed loop that loads an engine, and the words between bench and engine."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warmroot.deploy.bench.peers.protocol import Job, News, Timing, drive


class FakeBackend:
    """Every step gives every request one token; the first says that two prompt tokens were cached."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.left: dict[int, int] = {}
        self.started: list[int] = []
        self.most = 0

    def select(self, variant: str) -> None: ...

    def reset(self) -> None: ...

    def add(self, index: int, job: Job) -> None:
        self.left[index] = job.max_tokens
        self.most = max(self.most, len(self.left))

    def step(self) -> Iterable[News]:
        for index in list(self.left):
            first = index not in self.started
            if first:
                self.started.append(index)
            self.left[index] -= 1
            if not self.left[index]:
                del self.left[index]
            yield News(index, 1, 2 if first else None)


def test_concurrency_is_kept_until_all_are_done() -> None:
    backend = FakeBackend()
    ticks = itertools.count()
    jobs = [Job([0], tokens) for tokens in (3, 1, 2, 1, 4)]
    timings = drive(backend, jobs, 2, clock=lambda: float(next(ticks)))
    assert [len(timing.token_times) for timing in timings] == [3, 1, 2, 1, 4]
    assert backend.most == 2
    assert backend.started == [0, 1, 2, 3, 4]
    assert all(timing.cached_tokens == 2 for timing in timings)
    assert all(timing.start < timing.token_times[0] for timing in timings)


def test_timings_travel_as_json() -> None:
    timing = Timing(0.5, [1.25, 2.0000004], cached_tokens=3)
    assert Timing.from_wire(json.loads(json.dumps(timing.to_wire()))) == Timing(0.5, [1.25, 2.0], 3)


def test_a_method_of_the_backend_can_be_called_over_the_pipe(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    orders = [{"threads": 3}, {"call": "add", "arguments": {"a": 2, "b": 3}}]
    lines = "".join(json.dumps(order) + "\n" for order in orders)
    done = subprocess.run([sys.executable, str(script)], input=lines, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"threads": 3}, 5]
    assert "an engine talks" in done.stderr


PEER = """
from warmroot.deploy.bench.peers.protocol import serve

class Adder:
    def __init__(self, settings):
        print("an engine talks", flush=True)
        self.facts = settings

    def add(self, a, b):
        return a + b

serve(Adder)
"""
