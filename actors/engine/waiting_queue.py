"""Who waits, and who goes next.

Order is (priority with ageing, arrival): ``arrival + priority * age`` compares like a priority that falls by one for
every ``age`` seconds of waiting, and never needs sorting again. Among the first requests of the same priority the one
with the longest cached prefix goes first, so that requests sharing a prefix run while it is warm (RadixAttention,
arXiv 2312.07104); but nobody is overtaken more than ``max_overtakes`` times, and a preempted request not at all.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from ...kv_store.radix import Node, RadixTree
from .request import Request

MAX_SCAN = 256

Computing = set[tuple[Node, bytes]]
"""Blocks that running requests compute right now: the block before, and the tokens."""


class WaitingQueue:
    """Waiting requests in order. Look-ups are remembered per request and only continued."""

    def __init__(self, tree: RadixTree, block_size: int, max_overtakes: int, candidates: int) -> None:
        self._tree = tree
        self._block_size = block_size
        self._max_overtakes = max_overtakes
        self._candidates = candidates
        self._requests: list[Request] = []
        self.num_tokens = 0
        """Of all waiting requests, without those that were cached when they came."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """A new request, or a preempted one, which comes back to its old place."""
        insort(self._requests, request, key=_order)
        node = self._look_up(request)
        request.uncached = request.num_tokens - (0 if node is None else node.depth * self._block_size)
        self.num_tokens += request.uncached

    def remove(self, request: Request) -> None:
        """It starts, or is aborted."""
        del self._requests[bisect_left(self._requests, request.order, key=_order)]
        self.num_tokens -= request.uncached

    def choose(self, computing: Computing) -> Request | None:
        """The next to start; it stays in the queue until ``started``.

        A request whose next block is being computed by a running one is passed over: it will find it cached.
        """
        best: Request | None = None
        depth, seen = -1, 0
        for request in islice(self._requests, MAX_SCAN):
            node = self._look_up(request)
            if best is not None and request.priority != best.priority:
                break
            if node is not None and self._comes_soon(request, node, computing):
                continue
            warmth = node.depth if node is not None else 0
            if warmth > depth:
                best, depth = request, warmth
            seen += 1
            if seen == self._candidates or request.num_preemptions or request.overtaken >= self._max_overtakes:
                break
        return best

    def started(self, request: Request, computing: Computing) -> None:
        """``request`` was chosen and leaves; those before it that could have gone have been overtaken."""
        for other in self._requests:
            if other is request:
                break
            if other.node is None or not self._comes_soon(other, other.node, computing):
                other.overtaken += 1
        self.remove(request)

    def _look_up(self, request: Request) -> Node | None:
        if not request.reads_cache:
            return None
        node = request.node
        if node is not None and node.alive:
            node = self._tree.descend(node, request.packed)
        else:
            node = self._tree.find(request.namespace, request.packed)
        request.node = node
        return node

    def _comes_soon(self, request: Request, node: Node, computing: Computing) -> bool:
        return bool(computing) and (node, request.block_tokens(node.depth, self._block_size)) in computing


def _order(request: Request) -> tuple[float, int]:
    return request.order
