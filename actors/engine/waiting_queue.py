"""Who waits, and who goes next.

Order is (priority with ageing, arrival): ``arrival + priority * age`` compares like a priority that falls by one for
every ``age`` seconds of waiting, and never needs sorting again. Among the first requests of the same priority the one
with the longest cached prefix goes first, so that requests sharing a prefix run while it is warm (RadixAttention,
arXiv 2312.07104); but nobody is overtaken more than ``max_overtakes`` times, and a preempted request not at all.

Each tenant has a queue of its own in that order. Of those whose firsts have the priority of the very first, the one
that was served the least for its share is next (``FairShares``).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from ...cluster.fair_share import FairShares
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
        self._queues: dict[str, list[Request]] = {}
        self._length = 0
        self.shares = FairShares()
        """Of tenants whose requests wait or run."""
        self.held = False
        """Nobody starts who has not begun."""
        self.num_tokens = 0
        """Of all waiting requests, without those that were cached when they came."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def measure(self, request: Request) -> int:
        """Its tokens that are not cached."""
        node = self._look_up(request)
        return request.num_tokens - (0 if node is None else node.depth * self._block_size)

    def add(self, request: Request) -> None:
        """A new request, or a preempted one, which comes back to its old place."""
        insort(self._queues.setdefault(request.tenant, []), request, key=_order)
        self._length += 1
        request.uncached = self.measure(request)
        self.num_tokens += request.uncached

    def remove(self, request: Request) -> None:
        """It starts, or is aborted."""
        queue = self._queues[request.tenant]
        del queue[bisect_left(queue, request.order, key=_order)]
        if not queue:
            del self._queues[request.tenant]
        self._length -= 1
        self.num_tokens -= request.uncached

    def choose(self, computing: Computing) -> Request | None:
        """The next to start; it stays in the queue until ``started``.

        A request whose next block is being computed by a running one is passed over: it will find it cached.
        """
        return next((best for queue in self._in_turn() if (best := self._warmest(queue, computing))), None)

    def _in_turn(self) -> Iterable[list[Request]]:
        """The queues of all tenants, the next one first."""
        queues = self._queues
        if len(queues) < 2:
            return queues.values()
        urgent = min(queues.values(), key=lambda queue: queue[0].order)[0].priority

        def turn(tenant: str) -> tuple[bool, float]:
            return queues[tenant][0].priority != urgent, self.shares.served(tenant)

        return [queues[tenant] for tenant in sorted(queues, key=turn)]

    def _warmest(self, queue: list[Request], computing: Computing) -> Request | None:
        best: Request | None = None
        depth, seen = -1, 0
        startable = (request for request in queue if request.has_begun) if self.held else queue
        for request in islice(startable, MAX_SCAN):
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
        for other in self._queues[request.tenant]:
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
