"""Requests to replay: when they come, how long they are, which prefix they share. Readers of published formats.

- Mooncake (FAST'25): JSON lines ``{timestamp (ms), input_length, output_length, hash_ids}``; an id names a block of 512
  prompt tokens and all before it, so equal ids are KV that can be shared.
- Recordings of ``warmroot serve --record-trace``: the same, after a first line that tells the block size.
- Azure (AzurePublicDataset, 2023): CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``, without prefixes.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from ...cluster.damaged import MISTAKES
from ...cluster.errors import ConfigError

MOONCAKE_BLOCK = 512
_MOST_TOKENS = 10**8
_SHARED_BY = 0.05
"""A first block that begins this share of all prompts is a system prompt: copies of a trace share it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``block_ids`` name the prompt's blocks, the last of which may be partial."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; ``block_tokens`` is what an id stands for."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int = MOONCAKE_BLOCK

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def head(self, count: int) -> "Trace":
        """The first ``count`` requests."""
        return replace(self, requests=self.requests[:count])

    def tail(self, count: int) -> "Trace":
        """The last ``count`` requests."""
        return replace(self, requests=self.requests[-count:])


def read_trace(path: Path) -> Trace:
    """Raises ConfigError that names the line that is wrong."""
    try:
        requests, block_tokens = (_read_csv(path), MOONCAKE_BLOCK) if path.suffix == ".csv" else _read_lines(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace: {path}: {error}", param="trace") from error
    if not requests:
        raise ConfigError(f"trace: {path} has no requests", param="trace")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(path.stem, _renumbered(requests), block_tokens)


def spread(trace: Trace, rng: Random) -> Trace:
    """Arrivals stamped with one coarse tick come evenly, at random, until the next tick."""
    ticks = sorted({request.arrival_s for request in trace.requests})
    if len(ticks) > len(trace.requests) / 2 or len(ticks) < 2:
        return trace
    until = dict(zip(ticks, [*ticks[1:], 2 * ticks[-1] - ticks[-2]], strict=True))
    spread_out = [
        replace(request, arrival_s=rng.uniform(request.arrival_s, until[request.arrival_s]))
        for request in trace.requests
    ]
    return replace(trace, requests=sorted(spread_out, key=lambda request: request.arrival_s))


def superpose(trace: Trace, copies: int) -> Trace:
    """So many copies at once, each shifted in time (round the end) and with blocks of its own but a system prompt."""
    if copies == 1:
        return trace
    shared, stride = _system_blocks(trace), 1 + max((max(r.block_ids, default=0) for r in trace.requests), default=0)
    start, span = trace.requests[0].arrival_s, max(trace.span_s, 1e-9)
    requests = [
        replace(
            request,
            arrival_s=start + (request.arrival_s - start + span * copy / copies) % span,
            block_ids=tuple(i if i in shared else i + copy * stride for i in request.block_ids),
        )
        for copy in range(copies)
        for request in trace.requests
    ]
    return replace(trace, requests=sorted(requests, key=lambda request: request.arrival_s))


def at_rate(trace: Trace, requests_per_s: float) -> Trace:
    """The same requests with time stretched to that mean rate, from second 0."""
    start, factor = trace.requests[0].arrival_s, len(trace.requests) / requests_per_s / max(trace.span_s, 1e-9)
    return replace(
        trace,
        requests=[replace(request, arrival_s=(request.arrival_s - start) * factor) for request in trace.requests],
    )


def ideal_hit_rate(trace: Trace) -> float:
    """Share of prompt tokens that one endless cache would have."""
    seen, hit = set[int](), 0
    for request in trace.requests:
        leading = next((n for n, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids))
        hit += min(leading * trace.block_tokens, request.input_tokens)
        seen.update(request.block_ids)
    return hit / max(1, sum(request.input_tokens for request in trace.requests))


def _renumbered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Block ids as small as can be: hashes are not."""
    if max((max(request.block_ids, default=0) for request in requests), default=0) < 2**31:
        return requests
    numbers: dict[int, int] = {}
    return [
        replace(request, block_ids=tuple(numbers.setdefault(block, len(numbers)) for block in request.block_ids))
        for request in requests
    ]


def _system_blocks(trace: Trace) -> set[int]:
    first = Counter(request.block_ids[0] for request in trace.requests if request.block_ids)
    return {block for block, count in first.items() if count > _SHARED_BY * len(trace.requests)}


def _read_lines(path: Path) -> tuple[list[TraceRequest], int]:
    requests, block_tokens = list[TraceRequest](), MOONCAKE_BLOCK
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row: dict[str, Any] = json.loads(line)
                if "block_tokens" in row:
                    block_tokens = _count(row["block_tokens"])
                    continue
                ids = tuple(map(int, row.get("hash_ids", ())))
                arrival = _finite(float(row["timestamp"]) / 1e3)
                requests.append(TraceRequest(arrival, _count(row["input_length"]), _count(row["output_length"]), ids))
            except MISTAKES as error:
                raise ConfigError(f"trace: {path} line {number}: {error!r}", param="trace") from error
    return requests, block_tokens


def _read_csv(path: Path) -> list[TraceRequest]:
    requests, fresh = list[TraceRequest](), 0
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                arrival = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                length, output = _count(row["ContextTokens"]), _count(row["GeneratedTokens"])
            except MISTAKES as error:
                raise ConfigError(f"trace: {path} line {number}: {error!r}", param="trace") from error
            count = -(-length // MOONCAKE_BLOCK)
            requests.append(TraceRequest(arrival, length, output, tuple(range(fresh, fresh + count))))
            fresh += count
    return requests


def _count(value: Any) -> int:
    """Tokens; at least one, and no more than any model has ever read."""
    count = max(1, int(value))
    if count > _MOST_TOKENS:
        raise ValueError(f"{value!r:.40} tokens")
    return count


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"a timestamp must not be {seconds}")
    return seconds
