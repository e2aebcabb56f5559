"""Contenders without processes: every token takes a fixed time that depends on the contender's name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from warmroot.deploy.bench.contender import Contender
from warmroot.deploy.bench.lineup import Entry
from warmroot.deploy.bench.peers.protocol import Job, Timing


class FakeContender(Contender):
    """One request after the other; a prompt takes as long as a token."""

    def __init__(self, name: str, settings: Mapping[str, Any], seconds_per_token: float) -> None:
        self.name = name
        self.settings = settings
        self.facts = {"context": 2048}
        self.seconds = seconds_per_token
        self.closed = False

    def run(
        self, jobs: Sequence[Job], concurrency: int, *, reset: bool = True, variant: str = "default"
    ) -> tuple[list[Timing], float]:
        timings: list[Timing] = []
        now = 0.0
        seconds = self.seconds * (10 if variant == "uncached" and reset else 1)
        for job in jobs:
            timings.append(Timing(now, [now + seconds * (index + 1) for index in range(job.max_tokens)]))
            now = timings[-1].token_times[-1]
        return timings, now

    def call(self, method: str, **arguments: Any) -> Any:
        if method == "score":
            length = len(arguments["prompt"]) - 1
            loss = 1.005 if "int8" in self.name else 1.0
            wrong = 1 if "q4" in self.name else 0
            return {"logprobs": [-loss] * length, "argmax": [wrong] * length, "margins": [0.5] * length}
        if method == "step_cost":
            return {"step_s": 0.01, "kernels_s": 0.0095, "overhead_s": 0.0005, "overhead_share": 0.05}
        if arguments.get("batch", 1) * arguments.get("context", 1) > 2**20:
            return None
        return [self.seconds * 2, self.seconds, self.seconds * 3]

    def close(self) -> None:
        self.closed = True


def install(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> list[FakeContender]:
    """``Entry.start`` gives fakes; the list of all that were started."""
    started: list[FakeContender] = []

    def start(entry: Entry, note: Callable[[str], None], **changed: Any) -> FakeContender:
        started.append(FakeContender(entry.name, {**entry.settings, **changed}, seconds[entry.name]))
        return started[-1]

    monkeypatch.setattr(Entry, "start", start)
    return started
