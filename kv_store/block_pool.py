"""Who holds which page of KV memory. Every operation is O(1) per page."""

from collections.abc import Iterable

from ..cluster.ids import NULL_BLOCK, BlockId


class InvariantError(AssertionError):
    """A page was handled by somebody who does not hold it: a bug in the engine, never a user's error."""


class BlockPool:
    """Pages 1 … num_blocks - 1; page 0 is the null page and is never handed out.

    A page has *holders* (requests, counted) and may be *kept* by the prefix tree. It is free when it has neither,
    *used* while it has a holder, and *idle* when only the tree keeps it: used + idle + free = num_blocks - 1.
    """

    __slots__ = ("_free", "_holders", "_kept", "num_allocated", "num_blocks", "num_idle")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null page and at least one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_idle = 0
        self.num_allocated = 0
        """Pages ever handed out: the tree's clock, since a cache ages by what is written into it."""
        # A stack: the page freed last is the one most likely still in a CPU's cache.
        self._free = [BlockId(block) for block in range(num_blocks - 1, 0, -1)]
        self._holders = [0] * num_blocks
        self._kept = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds or keeps."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that at least one request holds."""
        return self.num_blocks - 1 - len(self._free) - self.num_idle

    def holders(self, block: BlockId) -> int:
        """How many requests hold a page."""
        return self._holders[block]

    def kept(self, block: BlockId) -> bool:
        """Whether the prefix tree keeps a page."""
        return self._kept[block] == 1

    def allocate(self, count: int) -> list[BlockId]:
        """Take ``count`` free pages, each with one holder. The caller has seen that there are enough."""
        if count > len(self._free):
            raise InvariantError(f"{count} pages asked of {len(self._free)} free ones")
        if count == 0:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            self._holders[block] = 1
        self.num_allocated += count
        return blocks

    def share(self, block: BlockId) -> None:
        """One more holder for a page that is used or idle."""
        if self._holders[block] == 0:
            if not self._kept[block]:
                raise InvariantError(f"page {block} is free and cannot be shared")
            self.num_idle -= 1
        self._holders[block] += 1

    def release(self, block: BlockId) -> None:
        """One holder less; without holders the page is idle if the tree keeps it, else free."""
        if self._holders[block] == 0 or block == NULL_BLOCK:
            raise InvariantError(f"page {block} has no holder to release it")
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if self._kept[block]:
                self.num_idle += 1
            else:
                self._free.append(block)

    def keep(self, block: BlockId) -> None:
        """The tree keeps a page that a request holds."""
        if self._kept[block] or self._holders[block] == 0:
            raise InvariantError(f"page {block} is kept already or held by nobody")
        self._kept[block] = 1

    def drop(self, block: BlockId) -> None:
        """The tree lets go of a page; without holders it is free at once."""
        if not self._kept[block]:
            raise InvariantError(f"page {block} is not kept")
        self._kept[block] = 0
        if self._holders[block] == 0:
            self.num_idle -= 1
            self._free.append(block)

    def check(self, held: Iterable[BlockId], kept: Iterable[BlockId]) -> None:
        """Compare the counts with the pages that requests and tree really have. Raises InvariantError."""
        holders = [0] * self.num_blocks
        for block in held:
            holders[block] += 1
        keeps = bytearray(self.num_blocks)
        for block in kept:
            keeps[block] += 1
        pages = range(1, self.num_blocks)
        free = {page for page in pages if not holders[page] and not keeps[page]}
        idle = sum(1 for page in pages if not holders[page] and keeps[page])
        if holders != self._holders or keeps != self._kept:
            raise InvariantError("holders or kept pages differ from the pool's counts")
        if free != set(self._free) or len(free) != len(self._free) or idle != self.num_idle:
            raise InvariantError("free or idle pages differ from the pool's counts")
