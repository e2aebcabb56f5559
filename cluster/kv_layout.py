"""How the layers' KV shares one pool of equal pages.

Layers of one kind (full attention, or one sliding window) form groups of equal size, and every group has a block
table of its own per request. A page holds ``block_size`` tokens for one group's layers, so any page fits any group:
full and sliding layers share one pool without a fixed split, and blocks that fell out of a window return to it.
A model with one kind of layer has one group, and nothing costs more than in a plain paged cache.
"""

from dataclasses import dataclass

OPEN_PAGES = (2, 32)
"""Of quantised formats, beside those that a step writes: open pages for each running sequence, and for all together."""
OPEN_SLACK = 1.25
"""Open pages grow by a quarter at a time."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table. ``window`` counts the tokens a query sees, itself included; None: all."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Groups of a model's layers over pages of ``slots`` layers each."""

    groups: tuple[KvGroup, ...]
    slots: int
    block_size: int

    @classmethod
    def of(cls, layer_windows: tuple[int | None, ...], block_size: int) -> "KvLayout":
        """Group layers by window; the rarest kind sets the page size, the others split into several groups."""
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(layer_windows):
            kinds.setdefault(window, []).append(layer)
        slots = min(len(layers) for layers in kinds.values())
        groups = tuple(
            KvGroup(tuple(layers[i : i + slots]), window)
            for window, layers in kinds.items()
            for i in range(0, len(layers), slots)
        )
        return cls(groups, slots, block_size)

    def stage(self, layers: range) -> "KvLayout":
        """The KV of a pipeline stage's layers, counted from its first, in the same groups: one block table serves all.

        A page has as many slots as the largest group has layers here; a group may have none.
        """
        groups = tuple(
            KvGroup(tuple(layer - layers.start for layer in group.layers if layer in layers), group.window)
            for group in self.groups
        )
        return KvLayout(groups, max(len(group.layers) for group in groups), self.block_size)

    def place(self, layer: int) -> tuple[int, int]:
        """(group, slot in the page) of a layer."""
        for group_index, group in enumerate(self.groups):
            if layer in group.layers:
                return group_index, group.layers.index(layer)
        raise IndexError(f"no layer {layer} in {self}")

    def blocks_for(self, group: int, num_tokens: int) -> int:
        """Blocks one sequence of ``num_tokens`` holds in a group while it decodes."""
        window = self.groups[group].window
        blocks = -(-num_tokens // self.block_size)
        if window is None:
            return blocks
        # A window that starts inside a block still needs that block.
        return min(blocks, (window - 1 + self.block_size - 1) // self.block_size + 1)

    def sequence_blocks(self, num_tokens: int) -> int:
        """Blocks it holds in all groups."""
        return sum(self.blocks_for(group, num_tokens) for group in range(len(self.groups)))

    def max_tokens(self, num_blocks: int) -> int:
        """The longest sequence that fits when it is alone; one of the blocks is never used."""
        low, high = 0, num_blocks
        if all(group.window is not None for group in self.groups):
            high = 2**31 // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_blocks(middle * self.block_size) <= num_blocks - 1:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def open_pages(self, max_num_seqs: int, step_tokens: int) -> int:
        """Most open pages of a quantised format, where so many sequences run and a step computes so many tokens."""
        per_sequence, spare = OPEN_PAGES
        runs = max_num_seqs + step_tokens // self.block_size
        groups = len(self.groups)
        return int(OPEN_SLACK * (groups * (per_sequence * max_num_seqs + runs) + spare))


def blocks_in(memory_bytes: int, page_bytes: int, open_page_bytes: int, open_pages: int) -> int:
    """Pages that memory has room for, with up to ``open_pages`` open ones beside them; never more open than others."""
    most = (memory_bytes - open_pages * open_page_bytes) // page_bytes
    return max(0, most if most >= open_pages else memory_bytes // (page_bytes + open_page_bytes))
