"""Prefixes counted per replica: a radix tree of token blocks into which whole prompts are added and taken out again."""

from ...cluster.ids import BlockHash, ReplicaId
from ...kv_store.hashing import TOKEN_BYTES
from ...kv_store.index import common_blocks
from ...kv_store.slots import Held, ReplicaSlots


class _Node:
    """An edge; ``counts`` says how many of the prompts added for a slot run through it, ``mask`` for which any does."""

    __slots__ = ("children", "counts", "mask", "tokens")

    def __init__(self, tokens: bytes, counts: dict[int, int], mask: int) -> None:
        self.tokens = tokens
        self.counts = counts
        self.mask = mask
        self.children: dict[bytes, _Node] = {}

    def count(self, slot: int, change: int) -> None:
        count = self.counts.get(slot, 0) + change
        if count:
            self.counts[slot] = count
            self.mask |= 1 << slot
        else:
            del self.counts[slot]
            self.mask &= ~(1 << slot)


class PrefixCounts:
    """Every ``add`` must be followed by one ``remove`` with the same arguments; what is left is what counts."""

    def __init__(self) -> None:
        self.slots = ReplicaSlots()
        """Whose the bits of masks are."""
        self._roots: dict[tuple[BlockHash, int], _Node] = {}
        self._slot_of: dict[ReplicaId, int] = {}
        self._totals: dict[ReplicaId, int] = {}
        self._left: set[ReplicaId] = set()

    def __len__(self) -> int:
        """Namespaces with prompts in them."""
        return len(self._roots)

    def add(self, namespace: BlockHash, block_size: int, tokens: bytes, replica: ReplicaId) -> None:
        """Count the whole blocks of a packed prompt for a replica."""
        step, slot = block_size * TOKEN_BYTES, self._enter(replica)
        end = len(tokens) // step * step
        node = self._roots.get((namespace, step)) or self._roots.setdefault((namespace, step), _Node(b"", {}, 0))
        node.count(slot, 1)
        depth = 0
        while depth < end:
            first = tokens[depth : depth + step]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _Node(tokens[depth:end], {}, 0)
            elif not tokens.startswith(child.tokens, depth):
                _split(child, common_blocks(child.tokens, 0, tokens, depth, step) * step, step)
            child.count(slot, 1)
            depth += len(child.tokens)
            node = child

    def remove(self, namespace: BlockHash, block_size: int, tokens: bytes, replica: ReplicaId) -> None:
        """Undo one ``add``."""
        step, slot = block_size * TOKEN_BYTES, self._slot_of[replica]
        end = len(tokens) // step * step
        root = node = self._roots[namespace, step]
        root.count(slot, -1)
        depth = 0
        while depth < end:
            first = tokens[depth : depth + step]
            child = node.children[first]
            child.count(slot, -1)
            if not child.counts:
                del node.children[first]
                break
            depth += len(child.tokens)
            node = child
        if not root.counts:
            del self._roots[namespace, step]
        self._totals[replica] -= 1
        self._free_if_left(replica)

    def forget(self, replica: ReplicaId) -> None:
        """Keep no place for a replica that has left, once nothing counts for it any more."""
        if replica in self._slot_of:
            self._left.add(replica)
            self._free_if_left(replica)

    def match(self, namespace: BlockHash, block_size: int, tokens: bytes) -> dict[ReplicaId, int]:
        """Leading tokens of the prompt that were added for each replica, without those that have none."""
        return self.slots.by_name(self.held(namespace, block_size, tokens))

    def held(self, namespace: BlockHash, block_size: int, tokens: bytes) -> Held:
        """``match`` without looking at single replicas: sets of ``slots``."""
        found: Held = []
        step = block_size * TOKEN_BYTES
        node = self._roots.get((namespace, step))
        depth = 0
        while node is not None and (node := node.children.get(tokens[depth : depth + step])) is not None:
            whole = tokens.startswith(node.tokens, depth)
            common = len(node.tokens) if whole else common_blocks(node.tokens, 0, tokens, depth, step) * step
            depth += common
            # Who counts in a node counts in all above it, so the last word is the longest.
            found.append((node.mask, depth // TOKEN_BYTES))
            if not whole:
                break
        return found

    def _enter(self, replica: ReplicaId) -> int:
        slot = self._slot_of.get(replica)
        if slot is None:
            slot = self._slot_of[replica] = self.slots.take(replica)
            self._totals[replica] = 0
        self._totals[replica] += 1
        if self._left:
            self._left.discard(replica)
        return slot

    def _free_if_left(self, replica: ReplicaId) -> None:
        if replica in self._left and not self._totals[replica]:
            self._left.discard(replica)
            del self._totals[replica]
            self.slots.free(self._slot_of.pop(replica))


def _split(node: _Node, at: int, step: int) -> None:
    tail = _Node(node.tokens[at:], dict(node.counts), node.mask)
    tail.children = node.children
    node.tokens = node.tokens[:at]
    node.children = {tail.tokens[:step]: tail}
