"""An engine in a process of its own, and rounds in which several take turns."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...cluster.errors import ServerError
from .metrics import Summary, summarize
from .peers.protocol import Job, Timing


class ContenderError(ServerError):
    """An engine under measurement failed; its own words are on stderr."""

    code = "contender_error"


class Contender:
    """A peer's process. ``python`` is the interpreter that has the engine installed."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: Mapping[str, Any],
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._scratch = tempfile.TemporaryDirectory(prefix="warmroot-bench-")
        self._process = subprocess.Popen(
            [python, "-m", f"{_package()}.deploy.bench.peers.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._scratch.name,
            env=_environment(Path(self._scratch.name), int(settings["threads"])) | dict(environment or {}),
        )
        try:
            self.facts = self._ask(settings)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def run(
        self, jobs: Sequence[Job], concurrency: int, *, reset: bool = True, variant: str = "default"
    ) -> tuple[list[Timing], float]:
        """Timings of each request, and the CPU seconds that the engine's process used."""
        answer = self._ask(
            {
                "jobs": [(job.prompt, job.max_tokens) for job in jobs],
                "concurrency": concurrency,
                "reset": reset,
                "variant": variant,
            }
        )
        return [Timing.from_wire(timing) for timing in answer["timings"]], answer["cpu_s"]

    def measure(self, jobs: list[Job], concurrency: int, *, reset: bool = True, variant: str = "default") -> Summary:
        """The figures of one run."""
        timings, _ = self.run(jobs, concurrency, reset=reset, variant=variant)
        return summarize(jobs, timings, concurrency)

    def call(self, method: str, **arguments: Any) -> Any:
        """What a method of the engine's backend returns: JSON values both ways."""
        return self._ask({"call": method, "arguments": arguments})

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

    def _ask(self, question: Mapping[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ContenderError(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(answer)


def _package() -> str:
    return __name__.split(".", maxsplit=1)[0]


def _environment(scratch: Path, threads: int) -> dict[str, str]:
    """Another interpreter sees this package and none of the packages around it: a link in an empty folder."""
    (scratch / _package()).symlink_to(Path(import_module(_package()).__path__[0]).absolute())
    return {
        **os.environ,
        "PYTHONPATH": str(scratch),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def take_turns(
    contenders: Sequence[Contender], rounds: Sequence[list[Job]], concurrency: int
) -> dict[str, list[Summary]]:
    """Every round's jobs run by every contender; who begins rotates."""
    results: dict[str, list[Summary]] = {contender.name: [] for contender in contenders}
    for number, jobs in enumerate(rounds):
        first = number % len(contenders) if contenders else 0
        for contender in (*contenders[first:], *contenders[:first]):
            results[contender.name].append(contender.measure(jobs, concurrency))
    return results
