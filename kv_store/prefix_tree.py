"""A small part of a prefix index, as a tree to look at: what was stored last, what is hot, and all that is above these.

The work is bounded by the size of the answer, not by that of the index: it starts at blocks and climbs to the roots.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..cluster.ids import BlockHash, ReplicaId
from .events import BlocksStored, CacheCleared, KvEvent, SnapshotPart
from .hash_map import KEY_BYTES
from .hashing import TOKEN_BYTES, salted
from .hot_prefixes import HotPrefix
from .index import Node, PrefixIndex, Root

MOST_LATEST = 512
HEAD_TOKENS = 32
"""Of an edge, that are shown of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """A run of blocks that the same replicas hold."""

    id: str
    """Hexadecimal: of its last block's hash."""
    parent: str | None
    """The node that it continues; None where it begins a namespace."""
    namespace: BlockHash
    """The root of its hashes, with the tenant's salt in it."""
    block_size: int
    depth: int
    """Tokens before it."""
    num_tokens: int
    head: bytes
    """Its first tokens, as ``hashing.pack_tokens`` makes them."""
    replicas: tuple[ReplicaId, ...]
    """Who holds it."""
    num_children: int
    """Nodes that continue it, those that are left out among them."""
    age: int
    """0 for what was stored last, or holds that; higher for what was stored before."""
    heat: float
    """Prompt tokens that it and what continues it save per second, as far as routers know."""


class LatestBlocks:
    """Ends of the runs that replicas stored last."""

    def __init__(self, most: int = MOST_LATEST) -> None:
        self._keys: deque[bytes] = deque(maxlen=most)

    def note(self, events: tuple[KvEvent, ...]) -> None:
        """A batch that the index has taken in. A snapshot's are older than what is known, hottest first."""
        ends = [event.hashes[-1][:KEY_BYTES] for event in events if isinstance(event, BlocksStored) and event.hashes]
        if events and isinstance(events[0], (SnapshotPart, CacheCleared)):
            room = (self._keys.maxlen or 0) - len(self._keys)
            self._keys.extendleft(ends[:room])
        else:
            self._keys.extend(ends)

    def __iter__(self) -> Iterator[bytes]:
        """Latest first."""
        return reversed(self._keys)


def prefix_tree(index: PrefixIndex, latest: Iterable[bytes], hot: Iterable[HotPrefix], limit: int) -> list[PrefixNode]:
    """At most ``limit`` nodes, parents before children and each followed by all that continues it.

    Hot prefixes come first, then the latest blocks with all above them, until there are so many.
    """
    chosen: dict[Node, _Seen] = {}
    for prefix in hot:
        if (node := _find(index, prefix)) is not None and not _choose(chosen, node, limit, heat=prefix.heat):
            break
    for age, key in enumerate(latest):
        place = index.locate(key)
        if place is not None and not _choose(chosen, place[0], limit, age=age):
            break
    return _described(index, chosen)


@dataclass(slots=True)
class _Seen:
    age: int
    heat: float = 0.0


def _choose(chosen: dict[Node, _Seen], node: Node, limit: int, *, age: int = MOST_LATEST, heat: float = 0.0) -> bool:
    """Take a node and all above it, roots left out, if there is room for them."""
    path: list[Node] = []
    above = node
    while above.parent is not None:
        path.append(above)
        above = above.parent
    if len(chosen) + sum(other not in chosen for other in path) > limit:
        return False
    for other in path:
        seen = chosen.setdefault(other, _Seen(age))
        seen.age = min(seen.age, age)
        seen.heat += heat
    return True


def _find(index: PrefixIndex, prefix: HotPrefix) -> Node | None:
    """The node in which a hot prefix ends; None if nobody holds all of it."""
    step, depth = prefix.block_size * TOKEN_BYTES, 0
    node: Node | None = index.roots.get((salted(prefix.namespace, prefix.salt), step))
    while depth < len(prefix.tokens):
        node = None if node is None else (node.children or {}).get(prefix.tokens[depth : depth + step])
        if node is None or not _agree(node.tokens, prefix.tokens[depth:]):
            return None
        depth += len(node.tokens)
    return node


def _agree(edge: bytes, wanted: bytes) -> bool:
    return wanted.startswith(edge) or edge.startswith(wanted)


def _described(index: PrefixIndex, chosen: dict[Node, _Seen]) -> list[PrefixNode]:
    """Depth first; children in the order of their tokens, so that what is drawn stays where it is."""
    children: dict[Node, list[Node]] = {}
    roots: dict[Root, None] = {}
    for node in chosen:
        above = node.parent
        if above is not None:
            children.setdefault(above, []).append(node)
        if isinstance(above, Root):
            roots[above] = None
    described: list[PrefixNode] = []
    for root in sorted(roots, key=lambda root: root.key):
        stack = [(child, 0) for child in _in_order(children[root])]
        while stack:
            node, depth = stack.pop()
            described.append(_describe(index, root, node, depth, chosen[node]))
            below = depth + len(node.tokens) // TOKEN_BYTES
            stack += [(child, below) for child in _in_order(children.get(node, []))]
    return described


def _in_order(nodes: list[Node]) -> list[Node]:
    """As a stack gives them out."""
    return sorted(nodes, key=lambda node: node.tokens, reverse=True)


def _describe(index: PrefixIndex, root: Root, node: Node, depth: int, seen: _Seen) -> PrefixNode:
    namespace, step = root.key
    above = node.parent
    return PrefixNode(
        id=_name(node),
        parent=None if above is None or isinstance(above, Root) else _name(above),
        namespace=namespace,
        block_size=step // TOKEN_BYTES,
        depth=depth,
        num_tokens=len(node.tokens) // TOKEN_BYTES,
        head=node.tokens[: HEAD_TOKENS * TOKEN_BYTES],
        replicas=index.slots.named(node.mask),
        num_children=len(node.children or ()),
        age=seen.age,
        heat=seen.heat,
    )


def _name(node: Node) -> str:
    return node.hashes[-KEY_BYTES:].hex()
