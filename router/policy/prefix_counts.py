"""Prefixes counted per replica: a radix tree of token blocks into which whole prompts are added and taken out again."""

from ...cluster.ids import BlockHash, ReplicaId
from ...kv_store.hashing import TOKEN_BYTES
from ...kv_store.index import common_blocks


class _Node:
    """An edge; ``counts`` says how many of the prompts added for a replica run through it."""

    __slots__ = ("children", "counts", "tokens")

    def __init__(self, tokens: bytes, counts: dict[ReplicaId, int]) -> None:
        self.tokens = tokens
        self.counts = counts
        self.children: dict[bytes, _Node] = {}


class PrefixCounts:
    """Every ``add`` must be followed by one ``remove`` with the same arguments; what is left is what counts."""

    def __init__(self) -> None:
        self._roots: dict[tuple[BlockHash, int], _Node] = {}

    def __len__(self) -> int:
        """Namespaces with prompts in them."""
        return len(self._roots)

    def add(self, namespace: BlockHash, block_size: int, tokens: bytes, replica: ReplicaId) -> None:
        """Count the whole blocks of a packed prompt for a replica."""
        step = block_size * TOKEN_BYTES
        tokens = tokens[: len(tokens) // step * step]
        node = self._roots.setdefault((namespace, step), _Node(b"", {}))
        _count(node, replica, 1)
        depth = 0
        while depth < len(tokens):
            first = tokens[depth : depth + step]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _Node(tokens[depth:], {})
            else:
                common = common_blocks(child.tokens, 0, tokens, depth, step) * step
                if common < len(child.tokens):
                    _split(child, common, step)
            _count(child, replica, 1)
            depth += len(child.tokens)
            node = child

    def remove(self, namespace: BlockHash, block_size: int, tokens: bytes, replica: ReplicaId) -> None:
        """Undo one ``add``."""
        step = block_size * TOKEN_BYTES
        tokens = tokens[: len(tokens) // step * step]
        root = node = self._roots[namespace, step]
        _count(root, replica, -1)
        depth = 0
        while depth < len(tokens):
            first = tokens[depth : depth + step]
            child = node.children[first]
            _count(child, replica, -1)
            if not child.counts:
                del node.children[first]
                break
            depth += len(child.tokens)
            node = child
        if not root.counts:
            del self._roots[namespace, step]

    def match(self, namespace: BlockHash, block_size: int, tokens: bytes) -> dict[ReplicaId, int]:
        """Leading tokens of the prompt that were added for each replica, without those that have none."""
        found: dict[ReplicaId, int] = {}
        step = block_size * TOKEN_BYTES
        node = self._roots.get((namespace, step))
        depth = 0
        while node is not None and (node := node.children.get(tokens[depth : depth + step])) is not None:
            whole = tokens.startswith(node.tokens, depth)
            common = len(node.tokens) if whole else common_blocks(node.tokens, 0, tokens, depth, step) * step
            depth += common
            # Who counts in a node counts in all above it, so the last word is the longest.
            found.update(dict.fromkeys(node.counts, depth // TOKEN_BYTES))
            if not whole:
                break
        return found


def _count(node: _Node, replica: ReplicaId, change: int) -> None:
    count = node.counts.get(replica, 0) + change
    if count:
        node.counts[replica] = count
    else:
        del node.counts[replica]


def _split(node: _Node, at: int, step: int) -> None:
    tail = _Node(node.tokens[at:], dict(node.counts))
    tail.children = node.children
    node.tokens = node.tokens[:at]
    node.children = {tail.tokens[:step]: tail}
