"""Traffic made up on the spot, where no trace is at hand: conversations, and agents with tools."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from .trace import MOONCAKE_BLOCK, Trace, TraceRequest

_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How sessions look. Lengths are in tokens; medians of log-normal draws with that spread."""

    system_prompts: int
    """Shared beginnings; the first are far more common than the last (Zipf)."""
    system_tokens: int
    first_tokens: float
    """Of a session's first message."""
    turn_tokens: float
    """Of each later message or tool result."""
    output_tokens: float
    spread: float
    turns: float
    """Mean of a session (geometric)."""
    pause_s: float
    """Median between an answer and the next turn."""


CHAT = Shape(
    system_prompts=4,
    system_tokens=512,
    first_tokens=180,
    turn_tokens=120,
    output_tokens=220,
    spread=1.0,
    turns=5.0,
    pause_s=30.0,
)
"""People who talk: short messages, long answers, pauses to read."""

AGENT = Shape(
    system_prompts=16,
    system_tokens=2560,
    first_tokens=1200,
    turn_tokens=900,
    output_tokens=110,
    spread=0.8,
    turns=4.0,
    pause_s=4.0,
)
"""Programs that call tools: long instructions in common, many quick turns, short answers."""


def chat(count: int, seed: int = 0) -> Trace:
    """``count`` requests of conversations."""
    return generate("chat", CHAT, count, seed)


def agent(count: int, seed: int = 0) -> Trace:
    """``count`` requests of agents."""
    return generate("agent", AGENT, count, seed)


GENERATORS: dict[str, Callable[[int, int], Trace]] = {"chat": chat, "agent": agent}
"""By the names that ``--trace`` takes."""


def generate(name: str, shape: Shape, count: int, seed: int) -> Trace:
    """Sessions begin at random over an hour; a turn repeats all that was said before it."""
    rng = Random(seed)
    requests = list(islice(conversations(shape, rng, BlockIds(), iter(lambda: rng.uniform(0, _HOUR), None)), count))
    return Trace(name, sorted(requests, key=lambda request: request.arrival_s))


def conversations(shape: Shape, rng: Random, ids: "BlockIds", begins: Iterable[float]) -> Iterator[TraceRequest]:
    """Sessions that begin at these seconds, one after the other."""
    systems = [ids.take(shape.system_tokens // MOONCAKE_BLOCK) for _ in range(shape.system_prompts)]
    weights = [1 / rank for rank in range(1, shape.system_prompts + 1)]
    begins = iter(begins)
    while True:
        system = rng.choices(systems, weights)[0]
        at = next(begins, None)
        if at is None:
            return
        yield from _session(shape, rng, ids, system, at)


def _session(shape: Shape, rng: Random, ids: "BlockIds", system: list[int], at: float) -> Iterator[TraceRequest]:
    length, blocks = len(system) * MOONCAKE_BLOCK, list(system)
    message = shape.first_tokens
    while True:
        length += _draw(rng, message, shape.spread)
        whole = length // MOONCAKE_BLOCK
        blocks += ids.take(whole - len(blocks))
        output = _draw(rng, shape.output_tokens, shape.spread)
        # The last block is partial: its content, and with it its id, is this turn's alone.
        yield TraceRequest(at, length, output, (*blocks, *ids.take(1)) if length % MOONCAKE_BLOCK else tuple(blocks))
        if rng.random() < 1 / shape.turns:
            return
        length, message = length + output, shape.turn_tokens
        at += rng.lognormvariate(math.log(shape.pause_s), shape.spread)


def _draw(rng: Random, median: float, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread)))


class BlockIds:
    """Block ids that nobody has."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        first, self._next = self._next, self._next + max(0, count)
        return list(range(first, self._next))
