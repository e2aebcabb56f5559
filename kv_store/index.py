"""Which replica holds which prefix, as a router sees it: a radix tree over token blocks, fed by KV events.

An edge is a run of whole blocks that the same set of replicas holds; the set is a bitmask. Lookups compare token
bytes, so the unmatched tail of a prompt is never hashed. A side map finds the node of a block hash: that is where
events attach.
"""

from enum import Enum, auto

from ..cluster.ids import BlockHash, Epoch, ReplicaId
from .events import BlocksStored, CacheCleared, KvEvent, KvEventBatch, SnapshotPart
from .hash_map import KEY_BYTES, HashMap
from .hashing import TOKEN_BYTES
from .slots import Held, ReplicaSlots

DEVICE_TIER = "device"


class Applied(Enum):
    """What became of a batch."""

    APPLIED = auto()
    STALE = auto()
    """Of an older epoch, or seen before: ignored."""
    GAP = auto()
    """Words in between are missing: ignored until a snapshot comes."""


class Node:
    """An edge of the tree: ``hashes`` has KEY_BYTES for each of its blocks."""

    __slots__ = ("children", "hashes", "mask", "number", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: bytes, hashes: bytes, mask: int, number: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hashes = hashes
        self.mask = mask
        self.number = number
        self.children: dict[bytes, Node] | None = None

    @property
    def block_bytes(self) -> int:
        """Token bytes of one block."""
        return len(self.tokens) * KEY_BYTES // len(self.hashes)


class Root(Node):
    """Where the chains of one namespace and block size begin; it has no blocks itself."""

    __slots__ = ("key",)

    def __init__(self, key: tuple[BlockHash, int]) -> None:
        super().__init__(None, b"", b"", 0, -1)
        self.key = key


class _Replica:
    """What the index knows of one replica's stream."""

    __slots__ = ("bit", "conflicts", "epoch", "in_step", "loading", "next_seq", "num_blocks")

    def __init__(self, bit: int, epoch: int) -> None:
        self.bit = bit
        self.epoch = epoch
        self.next_seq = 0
        self.in_step = True
        self.loading = False
        """In the middle of a snapshot."""
        self.num_blocks = 0
        self.conflicts = 0


class PrefixIndex:
    """Prefixes held by every replica. Feed it with ``apply``, ask it with ``match``."""

    def __init__(self) -> None:
        self.roots: dict[tuple[BlockHash, int], Root] = {}
        """By namespace and bytes of a block's tokens. Only the index changes them."""
        self._nodes: list[Node | None] = []
        self._free_numbers: list[int] = []
        self._where = HashMap()
        self._replicas: dict[ReplicaId, _Replica] = {}
        self.slots = ReplicaSlots()
        """Whose the bits of masks are."""

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held anywhere."""
        return len(self._where)

    def blocks_of(self, replica: ReplicaId) -> int:
        """Blocks the replica is believed to hold."""
        known = self._replicas.get(replica)
        return known.num_blocks if known else 0

    def conflicts_of(self, replica: ReplicaId) -> int:
        """Events of this incarnation that were cut short because they contradict what is known.

        Equal tokens with another hash, or a hash with other tokens: the sender is broken, or somebody before it was.
        """
        known = self._replicas.get(replica)
        return known.conflicts if known else 0

    def follows(self, replica: ReplicaId, epoch: Epoch) -> bool:
        """Whether nothing is missing of what this incarnation has told."""
        known = self._replicas.get(replica)
        return known is not None and known.epoch == epoch and known.in_step

    def apply(self, batch: KvEventBatch) -> Applied:
        """Take in one batch. After GAP, one that begins with ``CacheCleared`` or a snapshot sets things right.

        A snapshot that only tells what is known already is passed over.
        """
        replica = self._replicas.get(batch.replica)
        if replica is None or replica.epoch < batch.epoch:
            self.drop(batch.replica)
            bit = 1 << self.slots.take(batch.replica)
            replica = self._replicas[batch.replica] = _Replica(bit, batch.epoch)
        # Out of step, the snapshot may be of the very batch before the gap.
        oldest = replica.next_seq if replica.in_step else replica.next_seq - 1
        if batch.epoch < replica.epoch or batch.seq < oldest:
            return Applied.STALE
        first = batch.events[0] if batch.events else None
        follows = batch.seq == replica.next_seq and replica.in_step
        if not follows and not _is_whole(first):
            replica.in_step = False
            return Applied.GAP
        known = follows and isinstance(first, SnapshotPart) and not replica.loading and batch.seq > 0
        replica.next_seq = batch.seq + 1
        replica.in_step = True
        replica.loading = isinstance(first, SnapshotPart) and not known
        if not known:
            for event in batch.events:
                self._apply_event(replica, event)
        return Applied.APPLIED

    def match(self, namespace: BlockHash, tokens: bytes, block_size: int) -> dict[ReplicaId, int]:
        """Leading tokens of the prompt that each replica holds, whole blocks, without those that hold none.

        ``tokens`` is the prompt as ``hashing.pack_tokens`` makes it.
        """
        return self.slots.by_name(self.held(namespace, tokens, block_size))

    def held(self, namespace: BlockHash, tokens: bytes, block_size: int) -> Held:
        """``match`` without looking at single replicas: sets of ``slots``."""
        found: Held = []
        step = block_size * TOKEN_BYTES
        node: Node | None = self.roots.get((namespace, step))
        holders, depth = -1, 0
        while node is not None and node.children is not None:
            node = node.children.get(tokens[depth : depth + step])
            if node is None:
                break
            if depth and holders & ~node.mask:
                found.append((holders & ~node.mask, depth // TOKEN_BYTES))
            holders &= node.mask
            if not holders:
                return found
            if not tokens.startswith(node.tokens, depth):
                depth += common_blocks(node.tokens, 0, tokens, depth, step) * step
                break
            depth += len(node.tokens)
        if depth:
            found.append((holders, depth // TOKEN_BYTES))
        return found

    def drop(self, replica: ReplicaId, before: Epoch | None = None) -> None:
        """Forget a replica and all it held; with ``before`` only if what is known is of an older epoch."""
        gone = self._replicas.get(replica)
        if gone is not None and (before is None or gone.epoch < before):
            del self._replicas[replica]
            self._clear(gone)
            self.slots.free(gone.bit.bit_length() - 1)

    def _apply_event(self, replica: _Replica, event: KvEvent) -> None:
        if isinstance(event, (CacheCleared, SnapshotPart)):
            if _is_whole(event):
                self._clear(replica)
        elif event.tier != DEVICE_TIER:
            return
        elif isinstance(event, BlocksStored):
            gained, whole = self._store(replica.bit, event)
            replica.num_blocks += gained
            replica.conflicts += not whole
        else:
            for block in event.hashes:
                replica.num_blocks -= self._remove(replica.bit, block[:KEY_BYTES])

    def _clear(self, replica: _Replica) -> None:
        if not replica.num_blocks:
            return
        held = [node for node in self._nodes if node is not None and node.mask & replica.bit]
        for node in held:
            node.mask &= ~replica.bit
        for node in held:
            # Pruning one may have taken others along.
            if self._nodes[node.number] is node:
                self._settle(node)
        replica.num_blocks = 0

    def _store(self, bit: int, event: BlocksStored) -> tuple[int, bool]:
        """Mark a run of blocks as held; returns how many were not before, and whether all are now."""
        step = len(event.token_ids) // len(event.hashes)
        hashes = b"".join([block[:KEY_BYTES] for block in event.hashes])
        node = self._attachment(event.parent, step)
        if node.parent is not None and node.block_bytes != step:
            self._settle(node)
            return 0, False
        at, gained = 0, 0
        while at < len(hashes):
            first = at // KEY_BYTES * step
            child = (node.children or {}).get(event.token_ids[first : first + step])
            if child is None:
                node, added = self._grow(node, event.token_ids[first:], hashes[at:], bit)
                gained += added
                at += added * KEY_BYTES
                break
            common = common_blocks(child.hashes, 0, hashes, at, KEY_BYTES)
            if not common:
                break
            at += common * KEY_BYTES
            held = bool(child.mask & bit)
            if common * KEY_BYTES < len(child.hashes) and not (held and at == len(hashes)):
                child = self._split(child, common)
            if not held:
                child.mask |= bit
                gained += common
            node = self._join(node, child)
        self._settle(node)
        return gained, at == len(hashes)

    def _remove(self, bit: int, key: bytes) -> int:
        """Mark one block as no longer held; returns 1 if it was."""
        place = self.locate(key)
        if place is None or not place[0].mask & bit:
            return 0
        node, at = place
        if node.mask == bit and not node.children and (at + 1) * KEY_BYTES == len(node.hashes) and at:
            self._where.pop(key)
            node.tokens = node.tokens[: at * node.block_bytes]
            node.hashes = node.hashes[: at * KEY_BYTES]
            return 1
        if (at + 1) * KEY_BYTES < len(node.hashes):
            node = self._split(node, at + 1)
        if at:
            node = _only_child(self._split(node, at)) or node
        node.mask &= ~bit
        self._settle(node)
        return 1

    def locate(self, key: bytes) -> tuple[Node, int] | None:
        """The node of a block, by the first KEY_BYTES of its hash, and its place among the node's."""
        number = self._where.get(key)
        node = None if number is None else self._nodes[number]
        if node is None:
            return None
        at = node.hashes.find(key)
        while at > 0 and at % KEY_BYTES:
            at = node.hashes.find(key, at + 1)
        return None if at < 0 else (node, at // KEY_BYTES)

    def _attachment(self, parent: BlockHash, step: int) -> Node:
        """The node that ends with block ``parent``; a hash nobody stored is the root of a namespace."""
        place = self.locate(parent[:KEY_BYTES])
        if place is None:
            key = (parent, step)
            return self.roots.get(key) or self.roots.setdefault(key, Root(key))
        node, at = place
        return self._split(node, at + 1) if (at + 1) * KEY_BYTES < len(node.hashes) else node

    def _grow(self, node: Node, tokens: bytes, hashes: bytes, bit: int) -> tuple[Node, int]:
        """Add blocks below ``node`` that nobody held, up to one that is elsewhere; returns where, and how many."""
        extends = node.parent is not None and not node.children and node.mask == bit
        added = self._where.put(hashes, node.number if extends else self._next_number, overwrite=False)
        if not added:
            return node, 0
        size = len(tokens) * KEY_BYTES // len(hashes) * added
        tokens, hashes = tokens[:size], hashes[: added * KEY_BYTES]
        if extends:
            node.tokens += tokens
            node.hashes += hashes
        else:
            node = self._add(node, tokens, hashes, bit)
        return node, added

    @property
    def _next_number(self) -> int:
        return self._free_numbers[-1] if self._free_numbers else len(self._nodes)

    def _add(self, parent: Node, tokens: bytes, hashes: bytes, mask: int) -> Node:
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number = len(self._nodes)
            self._nodes.append(None)
        node = self._nodes[number] = Node(parent, tokens, hashes, mask, number)
        _adopt(parent, node)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge before block ``at``; returns its head. The shorter part gets a new number."""
        tokens, hashes = node.tokens, node.hashes
        cut, key_cut = at * node.block_bytes, at * KEY_BYTES
        if 2 * key_cut <= len(hashes):
            parent = _parent_of(node)
            node.tokens, node.hashes = tokens[cut:], hashes[key_cut:]
            head = self._add(parent, tokens[:cut], hashes[:key_cut], node.mask)
            _adopt(head, node)
            self._where.put(head.hashes, head.number)
            return head
        grandchildren, node.children = node.children, None
        node.tokens, node.hashes = tokens[:cut], hashes[:key_cut]
        tail = self._add(node, tokens[cut:], hashes[key_cut:], node.mask)
        for child in (grandchildren or {}).values():
            _adopt(tail, child)
        self._where.put(tail.hashes, tail.number)
        return node

    def _join(self, parent: Node, child: Node) -> Node:
        """Make one edge of a node and its only child if the same replicas hold both; returns where the child ends."""
        if parent.parent is None or parent.mask != child.mask or _only_child(parent) is not child:
            return child
        grandparent, tokens, hashes = parent.parent, parent.tokens + child.tokens, parent.hashes + child.hashes
        kept, lost = (parent, child) if len(parent.hashes) > len(child.hashes) else (child, parent)
        kept.children = child.children
        self._where.put(lost.hashes, kept.number)
        self._free(lost)
        kept.tokens, kept.hashes = tokens, hashes
        _adopt(grandparent, kept)
        for grandchild in (kept.children or {}).values():
            grandchild.parent = kept
        return kept

    def _settle(self, node: Node) -> None:
        """Restore the tree around a node whose set changed: nothing empty, nothing cut that need not be."""
        while node.parent is not None and not node.mask and not node.children:
            parent = node.parent
            _disown(parent, node)
            for at in range(0, len(node.hashes), KEY_BYTES):
                self._where.pop(node.hashes[at : at + KEY_BYTES])
            self._free(node)
            node = parent
        if isinstance(node, Root):
            if not node.children:
                del self.roots[node.key]
            return
        child = _only_child(node)
        if child is not None and child.mask == node.mask:
            node = self._join(node, child)
            if not node.mask and not node.children:  # the child was about to go as well
                return self._settle(node)
        self._join(_parent_of(node), node)

    def _free(self, node: Node) -> None:
        self._nodes[node.number] = None
        self._free_numbers.append(node.number)


def _is_whole(event: KvEvent | None) -> bool:
    """Whether what was known before no longer counts."""
    return isinstance(event, CacheCleared) or (isinstance(event, SnapshotPart) and event.number == 0)


def common_blocks(a: bytes, a_start: int, b: bytes, b_start: int, step: int) -> int:
    """Whole blocks of ``step`` bytes in which ``a`` from ``a_start`` and ``b`` from ``b_start`` agree."""
    low, high = 0, min(len(a) - a_start, len(b) - b_start) // step
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = low * step, middle * step
        if a[a_start + begin : a_start + end] == b[b_start + begin : b_start + end]:
            low = middle
        else:
            high = middle - 1
    return low


def _adopt(parent: Node, node: Node) -> None:
    if parent.children is None:
        parent.children = {}
    parent.children[node.tokens[: node.block_bytes]] = node
    node.parent = parent


def _disown(parent: Node, node: Node) -> None:
    if parent.children is not None:
        del parent.children[node.tokens[: node.block_bytes]]
        parent.children = parent.children or None


def _only_child(node: Node) -> Node | None:
    if node.children is None or len(node.children) != 1:
        return None
    return next(iter(node.children.values()))


def _parent_of(node: Node) -> Node:
    if node.parent is None:
        raise ValueError("the root of a tree has no parent")
    return node.parent
