"""How hot prefixes are: the beginnings that the latest requests share, by the prompt tokens that they save.

What requests found cached, sorted, is a tree without building one: the first and the last of a range agree in what all
of it shares. A prefix's heat is its length times the requests with it, over the time in which they came.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cluster.ids import BlockHash
from .hashing import TOKEN_BYTES
from .hot_prefixes import HotPrefix
from .index import common_blocks

WINDOW_S = 300.0
SHORTEST_WINDOW_S = 10.0
"""A few requests at once are no rate yet."""
MOST_SAMPLES = 512
MOST_TOKENS = 4096
"""Of a prefix: what lies behind is seldom shared, and 512 of these take 8 MiB."""


class _Served(NamedTuple):
    """A request that ended."""

    at: float
    cache: tuple[BlockHash, int, str]
    """Namespace, block size and salt."""
    tokens: bytes
    """Whole blocks that it found cached."""
    busy_s: float


@dataclass(slots=True, eq=False)
class _Shared:
    """A beginning that several requests share."""

    tokens: bytes
    num_blocks: int
    num_requests: int
    busy_s: float
    parent: "_Shared | None"
    num_left: int = field(init=False)
    """Requests that no prefix chosen below stands for."""
    num_covered: int = 0
    """Blocks of a prefix chosen above."""

    def __post_init__(self) -> None:
        self.num_left = self.num_requests

    @property
    def gain(self) -> int:
        """Blocks saved beyond those of the prefixes that are chosen already."""
        return self.num_left * (self.num_blocks - self.num_covered)

    def ancestors(self) -> "Iterator[_Shared]":
        """From the parent up."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


class HeatWindow:
    """The latest requests of one router, up to ``most_samples`` of ``window_s``; ``clock`` gives seconds."""

    def __init__(
        self, clock: Callable[[], float], window_s: float = WINDOW_S, most_samples: int = MOST_SAMPLES
    ) -> None:
        self._clock = clock
        self._window_s = window_s
        self._began = clock()
        self._served: deque[_Served] = deque(maxlen=most_samples)

    def note(
        self, namespace: BlockHash, block_size: int, salt: str, tokens: bytes, cached_tokens: int, busy_s: float
    ) -> None:
        """A request with packed ``tokens`` found ``cached_tokens`` of them and kept a replica busy for ``busy_s``."""
        num_blocks = min(cached_tokens, MOST_TOKENS) // block_size
        if num_blocks:
            cached = tokens[: num_blocks * block_size * TOKEN_BYTES]
            self._served.append(_Served(self._clock(), (namespace, block_size, salt), cached, busy_s))

    def hottest(self, limit: int) -> list[HotPrefix]:
        """At most ``limit`` prefixes of several requests, hottest first; none stands for another's requests."""
        now = self._clock()
        while self._served and now - self._served[0].at > self._window_s:
            self._served.popleft()
        by_cache: dict[tuple[BlockHash, int, str], list[_Served]] = defaultdict(list)
        for served in self._served:
            by_cache[served.cache].append(served)
        span_s, found = self._span_s(now), list[HotPrefix]()
        for (namespace, block_size, salt), group in by_cache.items():
            group.sort(key=lambda served: served.tokens)
            for node in _worthiest(_shared(group, block_size * TOKEN_BYTES), limit):
                heat = node.num_requests * node.num_blocks * block_size / span_s
                found.append(HotPrefix(namespace, block_size, node.tokens, heat, node.busy_s / span_s, salt))
        return sorted(found, key=lambda prefix: -prefix.heat)[:limit]

    def _span_s(self, now: float) -> float:
        """The time that the samples are of."""
        is_full = len(self._served) == self._served.maxlen
        return max(SHORTEST_WINDOW_S, now - (self._served[0].at if is_full else max(self._began, now - self._window_s)))


def _shared(group: list[_Served], step: int) -> list[_Shared]:
    """Every beginning at which sorted requests part; ``step`` is a block's bytes."""
    found: list[_Shared] = []
    ranges: list[tuple[int, int, _Shared | None]] = [(0, len(group), None)]
    while ranges:
        begin, end, parent = ranges.pop()
        if end - begin < 2:
            continue
        first = group[begin].tokens
        depth = common_blocks(first, 0, group[end - 1].tokens, 0, step)
        if depth:
            busy_s = sum(served.busy_s for served in group[begin:end])
            parent = _Shared(first[: depth * step], depth, end - begin, busy_s, parent)
            found.append(parent)
        ranges += ((*bounds, parent) for bounds in _branches(group, begin, end, depth * step, step))
    return found


def _branches(group: list[_Served], begin: int, end: int, at: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of requests that go on with the same block after ``at`` bytes."""
    while begin < end:
        block = group[begin].tokens[at : at + step]
        until = begin + 1
        while until < end and group[until].tokens[at : at + step] == block:
            until += 1
        if block:
            yield begin, until
        begin = until


def _worthiest(nodes: list[_Shared], limit: int) -> list[_Shared]:
    """Those that save the most one after the other, given what the ones before save."""
    chosen: list[_Shared] = []
    while nodes and len(chosen) < limit:
        best = max(nodes, key=lambda node: node.gain)
        if not best.gain:
            break
        nodes.remove(best)
        chosen.append(best)
        for above in best.ancestors():
            above.num_left -= best.num_left
        for node in nodes:
            if best in node.ancestors():
                node.num_covered = max(node.num_covered, best.num_blocks)
    return chosen
