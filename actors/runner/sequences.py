"""What a rank remembers of each sequence between steps: its tokens, block tables and sampling parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...cluster.ids import BlockId, RequestId
from ...cluster.sampling_params import SamplingParams
from ..engine.draft_tree import NO_DRAFT, Draft
from ..engine.plan import BlockTables, NewSequence
from .arrays import Int32s
from .guides import Guide
from .rows import is_plain


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence. Its tokens and blocks stand in row ``row`` of the tables."""

    request_id: RequestId
    row: int
    params: SamplingParams
    seed: int
    num_prompt: int
    num_tokens: int
    """Prompt and output, sampled tokens included."""
    wants_prompt_logprobs: bool
    is_plain: bool
    """Whether the likeliest token is all that is asked for."""
    num_blocks: int = 0
    """Per KV group."""
    draft: Draft = NO_DRAFT
    """What the last plan lets it verify."""
    draft_weights: torch.Tensor | None = None
    """[places, vocab]: what its guesses were drawn from, where they were drawn."""
    guide: Guide | None = None
    """Of an output that has a grammar, on ranks that sample."""
    pooled: torch.Tensor | None = None
    """[hidden] float32: sum over what has been computed of a prompt whose mean is asked for."""

    @property
    def num_output(self) -> int:
        """Output tokens so far, which is also the index of the next one."""
        return self.num_tokens - self.num_prompt


class Table:
    """int32 rows that grow in both directions; what was never written is 0."""

    def __init__(self, rows: int, columns: int) -> None:
        self.cells: Int32s = np.zeros((rows, columns), np.int32)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for at least so many. Sizes double, so that appending one by one stays cheap."""
        old = self.cells
        if rows <= old.shape[0] and columns <= old.shape[1]:
            return
        self.cells = np.zeros((_grown(old.shape[0], rows), _grown(old.shape[1], columns)), np.int32)
        self.cells[: old.shape[0], : old.shape[1]] = old


def _grown(size: int, wanted: int) -> int:
    return size if wanted <= size else max(wanted, 2 * size)


class SequenceTable:
    """All sequences of a rank, in rows that are reused."""

    def __init__(self, num_groups: int, *, rows: int = 8, columns: int = 512) -> None:
        self.tokens = Table(rows, columns)
        self.blocks = tuple(Table(rows, 32) for _ in range(num_groups))
        """Per KV group the block table; cells past a sequence's blocks are 0."""
        self._states: dict[RequestId, SequenceState] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: RequestId) -> SequenceState:
        return self._states[request_id]

    def get(self, request_id: RequestId) -> SequenceState | None:
        """None: dropped meanwhile, or not of this rank."""
        return self._states.get(request_id)

    def add(self, new: NewSequence) -> None:
        """Take in a sequence; one of the same id must have been dropped before."""
        row = self._free.pop() if self._free else len(self._states)
        state = SequenceState(
            request_id=new.request_id,
            row=row,
            params=new.params,
            seed=new.seed,
            num_prompt=new.num_prompt_tokens,
            num_tokens=len(new.token_ids),
            # Once there is output they have been delivered.
            wants_prompt_logprobs=new.params.prompt_logprobs is not None
            and len(new.token_ids) == new.num_prompt_tokens,
            is_plain=is_plain(new.params),
        )
        self._states[new.request_id] = state
        self.tokens.reserve(row + 1, state.num_tokens)
        self.tokens.cells[row, : state.num_tokens] = new.token_ids
        self._extend(state, new.block_tables)

    def extend(self, request_id: RequestId, blocks: BlockTables) -> None:
        """Append new blocks, equally many in each group."""
        self._extend(self._states[request_id], blocks)

    def _extend(self, state: SequenceState, blocks: Sequence[list[BlockId]]) -> None:
        start, end = state.num_blocks, state.num_blocks + len(blocks[0])
        for table, ids in zip(self.blocks, blocks, strict=True):
            table.reserve(state.row + 1, end)
            table.cells[state.row, start:end] = ids
        state.num_blocks = end

    def append(self, states: Sequence[SequenceState], token_ids: Sequence[int]) -> None:
        """Append one sampled token to each."""
        if not states:
            return
        ends = [state.num_tokens for state in states]
        self.tokens.reserve(0, max(ends) + 1)
        self.tokens.cells[[state.row for state in states], ends] = token_ids
        for state in states:
            state.num_tokens += 1

    def extend_by(self, state: SequenceState, token_ids: Sequence[int]) -> None:
        """Append sampled tokens to one."""
        self.note(state, 0, token_ids)
        state.num_tokens += len(token_ids)

    def note(self, state: SequenceState, ahead: int, token_ids: Sequence[int]) -> None:
        """Write guesses into the cells from ``ahead`` after a sequence's last token on, without appending them."""
        start = state.num_tokens + ahead
        self.tokens.reserve(0, start + len(token_ids))
        self.tokens.cells[state.row, start : start + len(token_ids)] = token_ids

    def learn(self, sampled: Iterable[tuple[RequestId, list[int]]]) -> None:
        """Append what another rank has sampled; unknown ids are ignored: dropped meanwhile, or not of this rank."""
        for request_id, token_ids in sampled:
            state = self._states.get(request_id)
            if state is not None:
                self.extend_by(state, token_ids)

    def drop(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences; unknown ids are ignored."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is None:
                continue
            for table in self.blocks:
                table.cells[state.row, : state.num_blocks] = 0
            self._free.append(state.row)

    def history(self, state: SequenceState, ahead: int = 0) -> Int32s:
        """Prompt and output tokens, and ``ahead`` guesses after them; a view."""
        return self.tokens.cells[state.row, : state.num_tokens + ahead]
