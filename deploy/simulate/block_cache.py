"""A replica's KV memory in whole blocks, as vLLM keeps it: shared, reference-counted, least recently used goes first.

A model of ``kv_store.PrefixCache`` for traces that name blocks by ids: same decisions at the granularity of the trace.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

NO_PARENT = -1


class BlockCache:
    """``capacity`` blocks. Generated tokens take room as ``private`` blocks that nobody shares.

    ``on_stored(parent id, ids)`` and ``on_removed(ids)`` hear of what becomes cached and what no longer is.
    """

    def __init__(
        self,
        capacity: int,
        on_stored: Callable[[int, Sequence[int]], None],
        on_removed: Callable[[Sequence[int]], None],
    ) -> None:
        self.capacity = capacity
        self.private = 0
        """Blocks of generated tokens."""
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._parents: dict[int, int] = {}

    @property
    def active(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders) + self.private

    @property
    def available(self) -> int:
        """Blocks that are free or can be made free."""
        return self.capacity - self.active

    def leading(self, ids: Sequence[int]) -> int:
        """Blocks of a prompt that are cached, from its start."""
        holders, idle = self._holders, self._idle
        for count, block in enumerate(ids):
            if block not in holders and block not in idle:
                return count
        return len(ids)

    def missing(self, ids: Sequence[int]) -> int:
        """Blocks that holding ``ids`` takes from what is available."""
        return sum(block not in self._holders for block in ids)

    def hold(self, ids: Sequence[int]) -> None:
        """Hold blocks that are cached."""
        for block in ids:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def store(self, parent: int, ids: Sequence[int]) -> None:
        """Hold blocks that are being computed, after ``parent``; there must be room."""
        self._make_room(sum(block not in self._holders and block not in self._idle for block in ids))
        fresh, first = list[int](), parent
        for block in ids:
            if block in self._holders or block in self._idle:
                self._tell_stored(first, fresh)
                fresh = []
            elif not fresh:
                first = parent
            if block not in self._parents:
                self._parents[block] = parent
                fresh.append(block)
            parent = block
        self.hold(ids)
        self._tell_stored(first, fresh)

    def release(self, ids: Sequence[int]) -> None:
        """Let go; the tail is to be evicted before the head."""
        for block in reversed(ids):
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
            else:
                del self._holders[block]
                self._idle[block] = None

    def take_private(self, count: int) -> bool:
        """Room for generated tokens; False if there is none."""
        if count > self.available:
            return False
        self._make_room(count)
        self.private += count
        return True

    def chains(self) -> list[tuple[int, int]]:
        """(parent, block) of all that is cached, parents first."""
        children: dict[int, list[int]] = {}
        for block, parent in self._parents.items():
            children.setdefault(parent, []).append(block)
        reached, at = [(NO_PARENT, block) for block in children.get(NO_PARENT, ())], 0
        while at < len(reached):
            block = reached[at][1]
            reached += [(block, child) for child in children.get(block, ())]
            at += 1
        return reached

    def _make_room(self, count: int) -> None:
        surplus = len(self._holders) + len(self._idle) + self.private + count - self.capacity
        if surplus > 0:
            gone = [self._idle.popitem(last=False)[0] for _ in range(min(surplus, len(self._idle)))]
            for block in gone:
                del self._parents[block]
            self._on_removed(gone)

    def _tell_stored(self, parent: int, ids: list[int]) -> None:
        if ids:
            self._on_stored(parent, ids)
