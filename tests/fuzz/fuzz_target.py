"""What is fuzzed: a function of bytes, the errors that it documents, and valid inputs to begin with."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzz_mutate import mutate_bytes, mutate_tree

MEMORY_BYTES = 768 * 2**20
"""What one input may make a reader allocate, beyond what the process has."""
SLOW_S = 10.0
"""One input of a few kilobytes must be done with long before; counted in processor time."""


class DefectError(AssertionError):
    """An input that its reader neither reads nor refuses."""


@dataclass(frozen=True)
class Target:
    """``run`` reads an input, checks what came out, and raises one of ``refusals`` for what it does not take."""

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], list[Any]]
    """Valid inputs: bytes, or trees that ``encode`` turns into them."""
    refusals: tuple[type[Exception], ...]
    encode: Callable[[Any], bytes] = bytes

    def inputs(self, rng: Random) -> Iterator[bytes]:
        """Endlessly many: first the seeds as they are, then changed ones."""
        seeds = self.seeds()
        yield from map(self.encode, seeds)
        while True:
            yield self.mutated(rng, rng.choice(seeds))

    def mutated(self, rng: Random, seed: Any) -> bytes:
        """The tree or the bytes of a seed, changed in one place or a few."""
        if not isinstance(seed, bytes) and rng.random() < 0.75:
            try:
                return self.encode(mutate_tree(rng, seed, rng.choice((1, 1, 2, 4))))
            except Exception:  # no such file can be written at all: its bytes are changed instead
                return mutate_bytes(rng, self.encode(seed))
        return mutate_bytes(rng, self.encode(seed), rng.choice((1, 1, 2, 4, 8)))

    def check(self, data: bytes) -> bool:
        """Whether ``data`` was taken. Raises DefectError."""
        started = time.process_time()
        try:
            with _bounded_memory():
                self.run(data)
            taken = True
        except self.refusals as error:
            if any(isinstance(cause, MemoryError) for cause in _causes(error)):
                raise DefectError(f"{self.name} allocates without bound: {data[:200]!r}") from error
            taken = False
        except Exception as error:
            raise DefectError(f"{self.name}: {type(error).__name__}: {error!s:.200} for {data[:2000]!r}") from error
        if time.process_time() - started > SLOW_S:
            raise DefectError(f"{self.name} is slow: {data[:2000]!r}")
        return taken


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """An allocation bomb raises MemoryError instead of taking the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
