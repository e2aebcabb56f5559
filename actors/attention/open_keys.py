"""The blocks that tokens still join: their keys are kept in 16 bits, beside the quantised page.

A channel's scale depends on all tokens of a block, so a block is quantised from there anew with every token. Its bytes
then follow from its tokens alone, however they were cut into steps; and tokens that speculation takes back leave no
trace.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...cluster.kv_layout import OPEN_PAGES, OPEN_SLACK

_FIRST_PAGES = 16
_GRACE_STEPS = 8
"""A complete block whose last tokens may be taken back stays open for so many steps."""
_MOST_DRAFTS = 32
"""The last tokens that a step writes for a sequence may be drafts (``num_speculative_tokens``)."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions [first, end) of a block, written in this step."""

    block: int
    first: int
    end: int
    num_after: int
    """Tokens of the same sequence that are written behind them."""


class OpenKeys:
    """Maps blocks to open pages, and holds those of every layer."""

    def __init__(self, num_blocks: int, page: tuple[int, int, int], num_slots: int, device: torch.device) -> None:
        """``page`` is [num_kv_heads, head_dim, block_size]."""
        self.pages = [torch.zeros((_FIRST_PAGES, *page), dtype=torch.float16, device=device) for _ in range(num_slots)]
        """Per page slot [open pages, num_kv_heads, head_dim, block_size]. Others when more are needed."""
        self._block_size = page[2]
        self._array = np.full(num_blocks, -1, np.int32)
        on_host = torch.from_numpy(self._array)
        self.table = on_host if device.type == "cpu" else on_host.to(device)
        """[num_blocks] int32: each block's page, -1 where it has none."""
        self._open: dict[int, int] = {}
        """Block -> page, the one written last at the end."""
        self._grace: dict[int, int] = {}
        """Complete blocks, and for how many steps they stay open."""
        self._free = list(range(_FIRST_PAGES))
        self._most_seqs = 0
        self.holds = False
        """Whether passes belong to the step before: no complete block's time passes."""

    @property
    def num_pages(self) -> int:
        """Pages allocated per slot."""
        return len(self.pages[0])

    def prepare(self, slots: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> dict[int, int]:
        """Open the blocks of the slots that a step writes. ``ends``: where each sequence's slots end.

        Returns those that had tokens but no open page, with how many: the caller fills their pages.
        """
        runs = _runs(slots, ends, self._block_size)
        if not self.holds:
            self._close({run.block for run in runs})
        self._most_seqs = max(self._most_seqs, len(ends))
        self._make_room({run.block for run in runs})
        reopened: dict[int, int] = {}
        for run in runs:
            if run.block not in self._open and run.first:
                reopened[run.block] = run.first
            self.open(run.block)
            if run.end == self._block_size:
                self._grace[run.block] = _GRACE_STEPS if run.num_after < _MOST_DRAFTS else 0
            else:
                self._grace.pop(run.block, None)
        if self.table.device.type != "cpu":
            self.table.copy_(torch.from_numpy(self._array))
        return reopened

    def open(self, block: int) -> int:
        """The block's page, as the one written last."""
        page = self._open.pop(block, -1)
        if page < 0:
            page = self._free.pop()
            self._array[block] = page
        self._open[block] = page
        return page

    def page_of(self, block: int) -> int | None:
        """The block's page, if it has one."""
        return self._open.get(block)

    def close(self, block: int) -> None:
        """Let go of the block's page, if it has one."""
        page = self._open.pop(block, None)
        if page is not None:
            self._free.append(page)
            self._array[block] = -1
            self._grace.pop(block, None)

    def _close(self, written: set[int]) -> None:
        """Complete blocks whose time is over."""
        for block, steps in list(self._grace.items()):
            if block in written:
                continue
            if steps == 0:
                self.close(block)
            else:
                self._grace[block] = steps - 1

    def _make_room(self, written: set[int]) -> None:
        """For the blocks of a step: those that were written longest ago are let go beyond a bound."""
        per_sequence, spare = OPEN_PAGES
        others = [block for block in self._open if block not in written]
        for block in others[: max(0, len(others) - per_sequence * self._most_seqs - spare)]:
            self.close(block)
        missing = len(written - self._open.keys()) - len(self._free)
        if missing > 0:
            self._grow(max(missing, int(self.num_pages * (OPEN_SLACK - 1.0))))

    def _grow(self, count: int) -> None:
        size = self.num_pages
        self._free += range(size, size + count)
        for slot, pages in enumerate(self.pages):
            more = torch.zeros((count, *pages.shape[1:]), dtype=pages.dtype, device=pages.device)
            self.pages[slot] = torch.cat((pages, more))


def _runs(slots: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], block_size: int) -> list[_Run]:
    """A sequence's tokens follow each other, so a block's do too."""
    blocks, offsets = np.divmod(slots, block_size)
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    lasts = np.append(starts[1:], len(slots)) - 1
    num_after = ends[np.searchsorted(ends, lasts, side="right")] - lasts - 1
    columns = (blocks[starts], offsets[starts], offsets[lasts] + 1, num_after)
    return [_Run(*run) for run in zip(*(column.tolist() for column in columns), strict=True)]
