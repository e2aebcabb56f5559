"""What the bench and the process of an engine say to each other, and the loop that loads the engine.

One JSON object per line. The bench's first line is the engine's settings; the answer is its facts. Then every line
``{"jobs", "concurrency", "reset", "variant"}`` is answered by ``{"timings", "cpu_s"}``, and every line ``{"call",
"arguments"}`` by what that method of the engine returns.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Job:
    """One request: greedy, and exactly ``max_tokens`` tokens whatever the model says."""

    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Timing:
    """When a request began and when each of its tokens came, in seconds since the run began."""

    start: float
    token_times: list[float] = field(default_factory=list[float])
    cached_tokens: int = 0

    def to_wire(self) -> list[Any]:
        """As JSON values, in whole microseconds."""
        return [round(self.start, 6), self.cached_tokens, [round(moment, 6) for moment in self.token_times]]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> "Timing":
        """Inverse of ``to_wire``."""
        start, cached_tokens, token_times = wire
        return cls(start, token_times, cached_tokens)


@dataclass(frozen=True, slots=True)
class News:
    """What a step gave one request."""

    index: int
    num_tokens: int
    cached_tokens: int | None = None


class Started(Protocol):
    """What has been built from the settings."""

    facts: dict[str, Any]
    """Version, precision and settings, for the report."""


class Backend(Started, Protocol):
    """An engine that batches continuously, or as well as it can."""

    def select(self, variant: str) -> None:
        """Switch to a variant of the engine that lives in the same process."""
        ...

    def reset(self) -> None:
        """Forget cached prefixes."""
        ...

    def add(self, index: int, job: Job) -> None:
        """Queue a request."""
        ...

    def step(self) -> Iterable[News]:
        """Run until some tokens have come."""
        ...


def drive(
    backend: Backend, jobs: list[Job], concurrency: int, clock: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """Keep ``concurrency`` requests in flight until all are done."""
    began = clock()
    timings: list[Timing] = []
    waiting, live = deque(jobs), 0
    while waiting or live:
        while waiting and live < concurrency:
            timings.append(Timing(clock() - began))
            backend.add(len(timings) - 1, waiting.popleft())
            live += 1
        news = backend.step()
        now = clock() - began
        for item in news:
            timing = timings[item.index]
            timing.token_times += [now] * item.num_tokens
            timing.cached_tokens += item.cached_tokens or 0
            live -= len(timing.token_times) == jobs[item.index].max_tokens
    return timings


def serve(build: Callable[[dict[str, Any]], Started]) -> None:
    """The main loop of an engine's process: settings in, facts out, then an answer per line until the input ends."""
    answers = _claim_stdout()
    settings = json.loads(sys.stdin.readline())
    backend = build(settings)
    _say(answers, backend.facts)
    for line in sys.stdin:
        _say(answers, _obey(backend, json.loads(line)))


def _claim_stdout() -> TextIO:
    """Engines print as they like: what they print goes to stderr, and the answers keep the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _obey(backend: Any, order: dict[str, Any]) -> Any:
    return getattr(backend, order["call"])(**order["arguments"]) if "call" in order else _run(backend, order)


def _run(backend: Backend, order: dict[str, Any]) -> dict[str, Any]:
    jobs = [Job(prompt, max_tokens) for prompt, max_tokens in order["jobs"]]
    backend.select(order["variant"])
    if order["reset"]:
        backend.reset()
    cpu = time.process_time()
    timings = drive(backend, jobs, order["concurrency"])
    return {"timings": [timing.to_wire() for timing in timings], "cpu_s": time.process_time() - cpu}


def _say(answers: TextIO, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
