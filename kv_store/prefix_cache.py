"""The prefix cache of one replica: pages, tree and the events that tell the routers what is where."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..cluster.ids import NULL_BLOCK, BlockHash, BlockId
from ..cluster.kv_layout import KvLayout
from .block_pool import BlockPool
from .events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from .hashing import pack_tokens
from .radix import Match, Node, RadixTree

MAX_PENDING_EVENTS = 4096


@dataclass(slots=True, eq=False)
class KvLease:
    """All that one request holds: its block tables, its cursor in the tree, the source of a pending copy."""

    tables: tuple[list[BlockId], ...]
    released: list[int]
    """Per group: blocks at the table's start that fell out of the window."""
    cursor: Node | None = None
    """The last block that is in the tree; None when this request is not cached (any more)."""
    num_committed: int = 0
    """Blocks from the start that have been offered to the tree."""
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list[tuple[BlockId, BlockId]])
    """(source, destination) to run before the next step; sources are held until ``copied``."""
    copy_node: Node | None = None


class PrefixCache:
    """Hands out pages, reuses what is cached, evicts what is cold. ``enabled=False`` only hands out pages."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, *, enabled: bool = True, min_partial: int | None = None
    ) -> None:
        self.layout = layout
        self.enabled = enabled
        self.pool = BlockPool(num_blocks)
        # A page is copied faster than a quarter of its tokens are computed.
        self.tree = RadixTree(layout, self.pool, layout.block_size // 4 if min_partial is None else min_partial)
        self.num_evicted = 0
        """Blocks forgotten to make room, since the start."""
        self._events: list[KvEvent] = []
        self._overflowed = False

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free, or cached and held by nobody."""
        return self.pool.num_free + self.pool.num_idle

    @property
    def num_cached(self) -> int:
        """Pages that only the tree keeps."""
        return self.pool.num_idle

    def missing(self, lease: KvLease, num_tokens: int) -> int:
        """Pages that a request still needs to decode its token number ``num_tokens``."""
        return sum(
            max(0, self.layout.blocks_for(group, num_tokens) - len(table) + lease.released[group])
            for group, table in enumerate(lease.tables)
        )

    def least_needed(self, match: Match, num_tokens: int) -> int:
        """Pages beside a match's own that ``num_tokens`` tokens need at least: cheap to know without holding it."""
        return sum(
            max(0, self.layout.blocks_for(group, num_tokens) - len(match.path))
            for group in range(len(self.layout.groups))
        )

    def max_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self.layout.max_tokens(self.pool.num_blocks)

    def match(self, namespace: BlockHash, tokens: bytes, max_tokens: int) -> Match:
        """The longest usable cached prefix of packed ``tokens``, at most ``max_tokens`` long."""
        if not self.enabled:
            return Match([], 0)
        return self.tree.match(namespace, tokens, max_tokens)

    def acquire(self, namespace: BlockHash, match: Match) -> KvLease | None:
        """Hold a match's pages, and pages to copy its partly shared block to. None if those cannot be had."""
        size, path = self.layout.block_size, match.path
        released = [min(self._first(g, match.num_tokens), len(path)) for g in range(len(self.layout.groups))]
        tables = tuple(
            [NULL_BLOCK] * first + [node.pages[group] for node in path[first:]] for group, first in enumerate(released)
        )
        lease = KvLease(tables, released, num_committed=match.num_tokens // size)
        for block in self._held(lease):
            self.pool.share(block)
        if self.enabled:
            self._move(lease, path[-1] if path else self.tree.root(namespace))
        if path:
            self.tree.touch(path[-1], hits=1)
        if match.partial is not None and not self._copy(lease, match.partial):
            self.release(lease)
            return None
        return lease

    def _copy(self, lease: KvLease, source: Node) -> bool:
        self.tree.pin(source)
        lease.copy_node = source
        for block in source.pages:
            self.pool.share(block)
        if not self._reserve(len(source.pages)):
            for block in source.pages:
                self._release_page(block)
            lease.copy_node = None
            self.tree.unpin(source)
            return False
        self.tree.touch(source)
        for table, block in zip(lease.tables, source.pages, strict=True):
            table.extend(self.pool.allocate(1))
            lease.copies.append((block, table[-1]))
        return True

    def copied(self, lease: KvLease) -> None:
        """The pending copies have run: let go of their sources."""
        for source, _ in lease.copies:
            self._release_page(source)
        lease.copies.clear()
        if lease.copy_node is not None:
            self.tree.unpin(lease.copy_node)
            lease.copy_node = None

    def grow(self, lease: KvLease, num_tokens: int) -> bool:
        """Give a request pages for ``num_tokens`` tokens in all, evicting if need be. False: nothing has changed."""
        missing = -(-num_tokens // self.layout.block_size) - len(lease.tables[0])
        if missing <= 0:
            return True
        if not self._reserve(missing * len(lease.tables)):
            return False
        for table in lease.tables:
            table.extend(self.pool.allocate(missing))
        return True

    def slide(self, lease: KvLease, num_computed: int) -> None:
        """Release the blocks that no token from ``num_computed`` on can see."""
        for group, table in enumerate(lease.tables):
            first = min(self._first(group, num_computed), len(table))
            for index in range(lease.released[group], first):
                self._release_page(table[index])
                table[index] = NULL_BLOCK
            lease.released[group] = max(first, lease.released[group])

    def commit(self, lease: KvLease, tokens: "array[int]", num_computed: int) -> None:
        """Put the full blocks among the first ``num_computed`` tokens into the tree."""
        size = self.layout.block_size
        first, last = lease.num_committed, num_computed // size
        if last <= first or lease.cursor is None:
            return
        lease.num_committed = last
        if not lease.cursor.alive:
            self._move(lease, None)
            return
        packed = pack_tokens(tokens[first * size : last * size])
        step = len(packed) // (last - first)
        node, fresh = lease.cursor, list[Node]()
        for index in range(first, last):
            start = (index - first) * step
            pages = tuple(table[index] for table in lease.tables)
            node, is_new = self.tree.insert(node, packed[start : start + step], pages)
            if is_new:
                fresh.append(node)
        # Below a new block everything is new, so the new ones are one run.
        self._move(lease, node)
        self.tree.touch(node)
        if fresh:
            self._emit(_stored(fresh))

    def release(self, lease: KvLease) -> None:
        """Let go of everything a request holds. Idempotent."""
        self.copied(lease)
        for block in self._held(lease):
            self._release_page(block)
        for group, table in enumerate(lease.tables):
            table.clear()
            lease.released[group] = 0
        self._move(lease, None)

    def clear(self) -> None:
        """Forget everything cached. Running requests go on with their own pages, uncached from here on."""
        self.tree.clear()
        self._events.clear()
        self._overflowed = False
        self._emit(CacheCleared())

    def drain_events(self) -> list[KvEvent]:
        """Events since the last call. When too many piled up: a clean start and a snapshot instead."""
        events: list[KvEvent] = [CacheCleared(), *self.snapshot_events()] if self._overflowed else self._events
        self._events = []
        self._overflowed = False
        return events

    def snapshot_events(self) -> list[BlocksStored]:
        """Everything cached, warmest first and no block before its parent. Drain the events before."""
        return [_stored(run) for run in self.tree.runs()]

    def _emit(self, event: KvEvent) -> None:
        if self._overflowed:
            return
        self._events.append(event)
        if len(self._events) > MAX_PENDING_EVENTS:  # nobody listens
            self._events = []
            self._overflowed = True

    def _first(self, group: int, position: int) -> int:
        """The first block that the query at ``position`` sees."""
        window = self.layout.groups[group].window
        return 0 if window is None else max(0, position - window + 1) // self.layout.block_size

    def _reserve(self, count: int) -> bool:
        """Make ``count`` pages free; evicts nothing when it cannot succeed."""
        if count > self.num_available:
            return False
        if count > self.pool.num_free:
            removed = self.tree.evict(count - self.pool.num_free)
            if removed:
                self.num_evicted += len(removed)
                self._emit(BlocksRemoved(tuple(removed)))
        return count <= self.pool.num_free

    def _release_page(self, block: BlockId) -> None:
        self.pool.release(block)
        if not self.pool.holders(block):
            self.tree.idle(block)

    def _held(self, lease: KvLease) -> Iterator[BlockId]:
        for table, first in zip(lease.tables, lease.released, strict=True):
            yield from table[first:]

    def _move(self, lease: KvLease, node: Node | None) -> None:
        before, lease.cursor = lease.cursor, node
        if node is not None:
            self.tree.pin(node)
        if before is not None:
            self.tree.unpin(before)


def _stored(run: list[Node]) -> BlocksStored:
    parent = run[0].parent
    assert parent is not None, "a root is never stored"
    return BlocksStored(parent.hash, tuple(node.hash for node in run), b"".join(node.tokens for node in run))
