"""The commonest step, in which every sequence computes the one token sampled last, in tensors that are kept."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..attention.interface import AttentionMetadata
from .arrays import Int64s, Mirror
from .sequences import SequenceState, SequenceTable

_MIN_BLOCKS = 32


class DecodeBatch:
    """Inputs of up to ``size`` sequences. As long as they are the same ones, a step only moves the arrays on.

    Rows past the sequences are padding: token 0 at position 0 of the null page, seeing itself alone.
    """

    def __init__(
        self, size: int, num_groups: int, block_size: int, device: torch.device, num_blocks: int = _MIN_BLOCKS
    ) -> None:
        """``num_blocks`` is the width of the block tables at first; wider ones are new tensors."""
        self.size = size
        self._block_size = block_size
        self._device = device
        self._token_ids = Mirror((size,), torch.int64, device)
        self._positions = Mirror((size,), torch.int64, device)
        self._seqused_k = Mirror((size,), torch.int32, device)
        self._seqused_k.array[:] = 1
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._slots = [Mirror((size,), torch.int64, device) for _ in range(num_groups)]
        self._tables = [Mirror((size, num_blocks), torch.int32, device) for _ in range(num_groups)]
        self._states: list[SequenceState] = []
        self._rows: Int64s = np.zeros(0, np.int64)
        self._num_blocks = 0
        """Of all sequences together: it grows when any of their tables does."""
        self._width = 0
        """Columns of the block tables that have been written."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[size] int64."""
        return self._token_ids.tensor

    @property
    def positions(self) -> torch.Tensor:
        """[size] int64."""
        return self._positions.tensor

    def metadata(self, max_seqlen_k: int) -> tuple[AttentionMetadata, ...]:
        """Per KV group. New objects each time: backends remember what they derived from the last ones."""
        return tuple(
            AttentionMetadata(self._cu_seqlens_q, self._seqused_k.tensor, table.tensor, slots.tensor, 1, max_seqlen_k)
            for table, slots in zip(self._tables, self._slots, strict=True)
        )

    def fill(self, table: SequenceTable, states: list[SequenceState], computed: Sequence[int]) -> None:
        """The next step: of each sequence the token after the ``computed`` ones. At most ``size`` sequences."""
        count = len(states)
        if states != self._states:
            self._take(states)
        positions = self._positions.array
        positions[:count] = computed
        np.add(positions, 1, out=self._seqused_k.array, casting="same_kind")
        here = positions[:count]
        self._token_ids.array[:count] = table.tokens.cells[self._rows, here]
        columns, offsets = here // self._block_size, here % self._block_size
        for blocks, slots in zip(table.blocks, self._slots, strict=True):
            slots.array[:count] = blocks.cells[self._rows, columns] * np.int64(self._block_size) + offsets
        num_blocks = sum([state.num_blocks for state in states])
        if num_blocks != self._num_blocks:
            self._num_blocks = num_blocks
            self._read_tables(table, max([state.num_blocks for state in states]))
        for mirror in (self._token_ids, self._positions, self._seqused_k, *self._slots):
            mirror.upload()

    @property
    def max_seqlen_k(self) -> int:
        """Most keys of one sequence."""
        return int(self._seqused_k.array.max())

    @property
    def key_limit(self) -> int:
        """Most keys that the block tables have room for."""
        return self._tables[0].array.shape[1] * self._block_size

    def _take(self, states: list[SequenceState]) -> None:
        """Other sequences than before."""
        self._states = states
        self._rows = np.array([state.row for state in states], np.int64)
        self._num_blocks = 0
        for mirror in (self._token_ids, self._positions, *self._slots):
            mirror.array[len(states) :] = 0
        for mirror in self._tables:
            mirror.array[:, : self._width] = 0

    def _read_tables(self, table: SequenceTable, width: int) -> None:
        self._width = width
        count = len(self._rows)
        for index, blocks in enumerate(table.blocks):
            if width > self._tables[index].array.shape[1]:
                self._tables[index] = Mirror((self.size, 2 * width), torch.int32, self._device)
            mirror = self._tables[index]
            mirror.array[:count, :width] = blocks.cells[self._rows, :width]
            mirror.upload()


class EagerDecodes:
    """Steps of decodes, launched operation by operation."""

    def __init__(
        self, compute: Callable[[DecodeBatch, int], torch.Tensor | None], make_batch: Callable[[int], DecodeBatch]
    ) -> None:
        """``compute`` gives logits [size, vocab] of a batch with at most so many keys a sequence, or None."""
        self._compute = compute
        self._make_batch = make_batch
        self._batch = make_batch(1)

    def logits(self, table: SequenceTable, states: list[SequenceState], computed: Sequence[int]) -> torch.Tensor | None:
        """[B, vocab] of the tokens after the ``computed`` ones; None where another rank samples."""
        if len(states) != self._batch.size:
            self._batch = self._make_batch(len(states))
        self._batch.fill(table, states, computed)
        return self._compute(self._batch, self._batch.max_seqlen_k)
