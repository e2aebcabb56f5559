"""The packed arrays of one step: every sequence's tokens one after the other."""

from dataclasses import dataclass

import numpy as np

from ..engine.draft_tree import Draft, ancestor_masks, depths
from ..engine.plan import StepPlan
from .arrays import Int32s, Int64s
from .sequences import SequenceState, SequenceTable


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where one KV group's keys are."""

    block_table: Int32s
    """[B, max_blocks]"""
    slot_mapping: Int64s
    """[T]: ``block * block_size + offset`` of each token's own key."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences in the order of the plan, T tokens in all."""

    token_ids: Int64s
    """[T]"""
    positions: Int64s
    """[T]: where each token stands in the text."""
    cu_seqlens_q: Int32s
    """[B + 1]: where each sequence's tokens start."""
    seqused_k: Int32s
    """[B]: keys per sequence, this step's included."""
    groups: tuple[GroupBatch, ...]
    states: list[SequenceState]
    samples: list[bool]
    """Per sequence, whether its last token's logits are sampled from."""
    drafts: list[Draft]
    """Per sequence, the tokens at its end that are guesses."""
    tree_mask: Int64s | None
    """[T], see ``AttentionMetadata``; None where there is no tree."""

    @property
    def max_seqlen_q(self) -> int:
        """Most tokens of one sequence."""
        return int(np.diff(self.cu_seqlens_q).max())

    @property
    def max_seqlen_k(self) -> int:
        """Most keys of one sequence."""
        return int(self.seqused_k.max())

    @property
    def verifies(self) -> bool:
        """Whether there are guesses."""
        return any(self.drafts)

    @property
    def verified(self) -> list[tuple[SequenceState, Draft]]:
        """The sequences that sample, in order, with their guesses."""
        rows = zip(self.states, self.drafts, self.samples, strict=True)
        return [(state, draft) for state, draft, samples in rows if samples]

    @property
    def sampled(self) -> list[SequenceState]:
        """The sequences that sample, in order."""
        return [state for state, samples in zip(self.states, self.samples, strict=True) if samples]

    @property
    def sampled_rows(self) -> Int64s:
        """[R]: the packed rows of each sampling sequence's last token, and of its guesses."""
        ends = self.cu_seqlens_q[1:][self.samples].astype(np.int64)
        if not self.verifies:
            return ends - 1
        counts = [1 + len(draft) for _, draft in self.verified]
        return np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])


def apply_diff(table: SequenceTable, plan: StepPlan) -> None:
    """Bring the sequences up to date with a plan."""
    table.drop(plan.finished)
    for new in plan.new:
        table.add(new)
    for step in plan.sequences:
        if step.new_blocks and step.new_blocks[0]:
            table.extend(step.request_id, step.new_blocks)
        state = table[step.request_id]
        state.draft = step.draft
        if step.draft:
            table.note(state, 0, step.draft.token_ids)


def only_decodes(plan: StepPlan) -> bool:
    """Whether every sequence computes one token and samples the next."""
    return all(step.num_tokens == 1 and step.samples for step in plan.sequences)


def pack(table: SequenceTable, plan: StepPlan, block_size: int) -> Batch:
    """Arrays of a plan that has at least one sequence and has been applied to the table."""
    states = [table[step.request_id] for step in plan.sequences]
    computed = np.array([step.num_computed for step in plan.sequences], np.int64)
    lengths = np.array([step.num_tokens for step in plan.sequences], np.int64)
    rows = np.array([state.row for state in states], np.int64)
    ends = np.cumsum(lengths)
    token_rows = np.repeat(rows, lengths)
    cells = np.arange(ends[-1]) + np.repeat(computed - ends + lengths, lengths)
    seqused_k = computed + lengths
    num_blocks = -(-int(seqused_k.max()) // block_size)
    columns, offsets = np.divmod(cells, block_size)
    positions, tree_mask = _with_trees(plan, cells)
    return Batch(
        token_ids=table.tokens.cells[token_rows, cells].astype(np.int64),
        positions=positions,
        cu_seqlens_q=np.concatenate(([0], ends)).astype(np.int32),
        seqused_k=seqused_k.astype(np.int32),
        groups=tuple(
            GroupBatch(
                block_table=blocks.cells[rows, :num_blocks],
                slot_mapping=blocks.cells[token_rows, columns].astype(np.int64) * block_size + offsets,
            )
            for blocks in table.blocks
        ),
        states=states,
        samples=[step.samples for step in plan.sequences],
        drafts=[step.draft for step in plan.sequences],
        tree_mask=tree_mask,
    )


def _with_trees(plan: StepPlan, cells: Int64s) -> tuple[Int64s, Int64s | None]:
    """(positions, mask) of tokens in cells: a node stands behind its ancestors, not behind those of other branches."""
    if not any(step.draft.parents for step in plan.sequences):
        return cells, None
    positions, mask, start = cells.copy(), np.zeros_like(cells), 0
    for step in plan.sequences:
        end, parents = start + step.num_tokens, step.draft.parents
        if parents:
            positions[start + 1 : end] = cells[start] + np.array(depths(parents))
            mask[start:end] = ancestor_masks(parents)
        start = end
    return positions, mask
