"""The prefix tree: which token blocks are cached, in which pages, and how warm they are.

Every edge is one whole block, so a request's place in the tree (its cursor) is a node, stays valid whatever is
inserted or evicted around it, and moves on in O(1). A cursor pins its node; since blocks leave the tree only at the
leaves, one pin protects the whole path above it.

**Windows.** A block has one page per KV group. Full-attention groups always have theirs; a page of a sliding-window
group may be missing (NULL_BLOCK), because nothing reads it once it lies outside every window of interest.

**Heat.** Time is counted in pages written, because that is what pushes blocks out. A block's warmth is the time it
was last used plus a bonus per hit, at most one turnover of the whole pool: what was shared survives one wave of
prompts that nobody repeats, but not for ever. A removed leaf bequeaths its heat to its parent, so that a prefix is
as warm as all that grew on it without every look-up having to touch the whole path.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from ..cluster.ids import NULL_BLOCK, BlockHash, BlockId
from ..cluster.kv_layout import KvLayout
from .block_pool import BlockPool
from .hashing import TOKEN_BYTES, block_hash

MAX_HITS = 8
MAX_PARTIAL_CANDIDATES = 256

Pages = tuple[BlockId, ...]
"""One page per KV group."""


class Node:
    """One cached block; a namespace's root is a node without tokens and pages. Compared by identity."""

    __slots__ = ("alive", "children", "depth", "hash", "hits", "pages", "parent", "pins", "queued", "tokens", "used_at")

    def __init__(self, parent: "Node | None", tokens: bytes, hash: BlockHash, pages: Pages) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hash = hash
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.depth: int = parent.depth + 1 if parent else 0
        self.pins = 0
        self.hits = 0
        self.used_at = 0
        self.queued = False
        self.alive = True


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix: whole blocks of ``path``, then ``num_partial`` tokens of ``partial``'s block."""

    path: list[Node]
    num_tokens: int
    partial: Node | None = None
    num_partial: int = 0


class RadixTree:
    """Token blocks of all namespaces over one pool of pages. Token strings are packed (``hashing.pack_tokens``)."""

    def __init__(self, layout: KvLayout, pool: BlockPool, min_partial: int) -> None:
        self._layout = layout
        self._pool = pool
        self._min_partial = min_partial
        self._step = TOKEN_BYTES * layout.block_size
        self._windows = [(g, group.window) for g, group in enumerate(layout.groups) if group.window is not None]
        self._bonus = pool.num_blocks / MAX_HITS
        self._roots: dict[BlockHash, Node] = {}
        self._owners: dict[BlockId, Node] = {}
        self._queued_pages: set[BlockId] = set()
        self._heap: list[tuple[float, int, Node | BlockId]] = []
        self._pushes = 0

    def root(self, namespace: BlockHash) -> Node:
        """The root of a namespace. An unpinned empty root goes when its last block goes."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", namespace, ())
        return root

    def descend(self, node: Node, tokens: bytes) -> Node:
        """The deepest cached node that continues ``node`` along ``tokens`` (packed, from the namespace's root)."""
        step, start = self._step, node.depth * self._step
        while child := node.children.get(tokens[start : start + step]):
            node, start = child, start + step
        return node

    def find(self, namespace: BlockHash, tokens: bytes) -> Node | None:
        """The deepest cached node along ``tokens``, windows disregarded; None for an unknown namespace."""
        root = self._roots.get(namespace)
        return self.descend(root, tokens) if root else None

    def match(self, namespace: BlockHash, tokens: bytes, max_tokens: int) -> Match:
        """The longest cached prefix of ``tokens`` that may be used, at most ``max_tokens`` long."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return Match(path, 0)
        step = self._step
        for start in range(0, max_tokens // self._layout.block_size * step, step):
            node = node.children.get(tokens[start : start + step])
            if node is None:
                break
            path.append(node)
        del path[self._usable(path) :]
        num_tokens = len(path) * self._layout.block_size
        tip = path[-1] if path else self._roots[namespace]
        wanted = tokens[len(path) * step : min(max_tokens * TOKEN_BYTES, (len(path) + 1) * step)]
        partial, num_partial = self._partial(tip, wanted)
        return Match(path, num_tokens, partial, num_partial)

    def _usable(self, path: list[Node]) -> int:
        """Most blocks of ``path`` after which every window finds its pages."""
        if not self._windows:
            return len(path)
        block_size, usable = self._layout.block_size, 0
        present = [0] * len(self._layout.groups)
        for num_blocks, node in enumerate(path, start=1):
            enough = True
            for group, window in self._windows:
                present[group] = present[group] + 1 if node.pages[group] else 0
                first = max(0, num_blocks * block_size - window + 1) // block_size
                enough = enough and present[group] >= num_blocks - first
            if enough:
                usable = num_blocks
        return usable

    def _partial(self, node: Node, wanted: bytes) -> tuple[Node | None, int]:
        """The child that shares most first tokens with ``wanted``, if they are at least ``min_partial``."""
        head = wanted[: self._min_partial * TOKEN_BYTES]
        if not self._min_partial or len(head) < self._min_partial * TOKEN_BYTES:
            return None, 0
        best, most = None, 0
        # Bounded: a system prompt may have thousands of continuations.
        for child in islice(reversed(node.children.values()), MAX_PARTIAL_CANDIDATES):
            if child.tokens.startswith(head) and all(child.pages):
                shared = _common_tokens(child.tokens, wanted)
                if shared > most:
                    best, most = child, shared
        return best, most

    def insert(self, parent: Node, tokens: bytes, pages: Pages) -> tuple[Node, bool]:
        """Add a block that a request has computed after ``parent``; returns its node and whether it is new.

        When the block is there already, a page of it that nobody holds gives way to the request's own and is freed:
        the request cannot change pages under a running model, and two copies would cost memory. A page that
        others hold stays, and the request's own remains uncached.
        """
        node = parent.children.get(tokens)
        if node is None:
            node = Node(parent, tokens, block_hash(parent.hash, tokens), pages)
            parent.children[tokens] = node
            for page in filter(None, pages):
                self._pool.keep(page)
            self._own(node)
            return node, True
        node.pages = tuple(self._better(old, new) for old, new in zip(node.pages, pages, strict=True))
        self._own(node)
        return node, False

    def _own(self, node: Node) -> None:
        for group, _ in self._windows:
            if page := node.pages[group]:
                self._owners[page] = node

    def _better(self, old: BlockId, new: BlockId) -> BlockId:
        if not new or old == new or (old and self._pool.holders(old)):
            return old
        if old:
            self._owners.pop(old, None)
            self._pool.drop(old)
        self._pool.keep(new)
        return new

    def pin(self, node: Node) -> None:
        """A cursor comes to ``node``."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """A cursor leaves ``node``."""
        node.pins -= 1
        if node.pins == 0 and node.alive:
            self._retire(node)

    def touch(self, node: Node, hits: int = 0) -> None:
        """``node`` is in use now; a hit makes it stay longer."""
        node.used_at = self._pool.num_allocated
        node.hits = min(node.hits + hits, MAX_HITS)

    def idle(self, page: BlockId) -> None:
        """A page that lost its last holder: one of a window may go without its block."""
        owner = self._owners.get(page)
        if owner is not None and page not in self._queued_pages:
            self._queued_pages.add(page)
            self._push(owner, page)

    def evict(self, num_pages: int) -> list[BlockHash]:
        """Free at least ``num_pages`` pages, coldest first, if so many can go; returns the blocks removed."""
        removed: list[BlockHash] = []
        target = self._pool.num_free + num_pages
        while self._pool.num_free < target and self._heap:
            warmth, _, item = heappop(self._heap)
            if isinstance(item, Node):
                item.queued = False
                if not item.alive or item.pins or item.children:
                    continue
                if self._warmth(item) > warmth:
                    self._retire(item)
                else:
                    removed.append(item.hash)
                    self._remove(item)
            else:
                self._strip(item, warmth)
        return removed

    def _strip(self, page: BlockId, warmth: float) -> None:
        """Drop one window's idle page, unless it has become warmer or is in use."""
        self._queued_pages.discard(page)
        owner = self._owners.get(page)
        if owner is None or self._pool.holders(page):
            return
        if self._warmth(owner) > warmth:
            self.idle(page)
            return
        owner.pages = tuple(NULL_BLOCK if kept == page else kept for kept in owner.pages)
        del self._owners[page]
        self._pool.drop(page)

    def _remove(self, leaf: Node) -> None:
        self._detach(leaf)
        parent = leaf.parent
        if parent is None:
            return
        del parent.children[leaf.tokens]
        parent.used_at = max(parent.used_at, leaf.used_at)
        parent.hits = min(parent.hits + leaf.hits, MAX_HITS)
        if not parent.children and not parent.pins:
            self._retire(parent)

    def _detach(self, node: Node) -> None:
        node.alive = False
        for page in filter(None, node.pages):
            self._owners.pop(page, None)
            self._pool.drop(page)

    def _retire(self, node: Node) -> None:
        """Make an unpinned leaf a candidate for eviction; an empty root just goes."""
        if node.children:
            return
        if node.parent is None:
            node.alive = False
            self._roots.pop(node.hash, None)
        elif not node.queued:
            node.queued = True
            self._push(node, node)

    def _push(self, node: Node, item: "Node | BlockId") -> None:
        self._pushes += 1  # breaks ties, oldest first, so that nodes are never compared
        heappush(self._heap, (self._warmth(node), self._pushes, item))

    def _warmth(self, node: Node) -> float:
        return node.used_at + self._bonus * node.hits

    def clear(self) -> None:
        """Forget every block; pages that requests hold stay theirs, and their cursors are dead."""
        for node in list(self.nodes()):
            self._detach(node)
        for root in self._roots.values():
            root.alive = False
        self._roots.clear()
        self._heap.clear()
        self._owners.clear()
        self._queued_pages.clear()

    def nodes(self) -> Iterator[Node]:
        """Every cached block, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def runs(self) -> Iterator[list[Node]]:
        """Every cached block once, in runs of parent and child, warmest leaf first, no block before its parent."""
        leaves = [node for node in self.nodes() if not node.children]
        seen: set[Node] = set()
        for leaf in sorted(leaves, key=self._warmth, reverse=True):
            run: list[Node] = []
            node = leaf
            while node.parent is not None and node not in seen:
                run.append(node)
                node = node.parent
            seen.update(run)
            yield run[::-1]


def _common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
