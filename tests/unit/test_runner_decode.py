"""Batches of decodes, kept from step to step: they say what a batch packed anew says."""

import numpy as np
import torch
from decode_harness import BLOCK_SIZE, Sequences

from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.runner.batch import apply_diff, only_decodes, pack
from warmroot.actors.runner.decode import DecodeBatch
from warmroot.actors.runner.sequences import SequenceTable
from warmroot.cluster.ids import RequestId

CPU = torch.device("cpu")


def check(batch: DecodeBatch, table: SequenceTable, plan: StepPlan) -> None:
    """Rows of sequences as packed anew, and harmless rows after them."""
    states = [table[step.request_id] for step in plan.sequences]
    batch.fill(table, states, [step.num_computed for step in plan.sequences])
    wanted, count = pack(table, plan, BLOCK_SIZE), len(states)
    padding = batch.size - count
    assert batch.token_ids.tolist() == wanted.token_ids.tolist() + [0] * padding
    assert batch.positions.tolist() == wanted.positions.tolist() + [0] * padding
    for group, metadata in zip(wanted.groups, batch.metadata(batch.max_seqlen_k), strict=True):
        assert metadata.cu_seqlens_q.tolist() == list(range(batch.size + 1))
        assert metadata.seqused_k.tolist() == wanted.seqused_k.tolist() + [1] * padding
        assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (1, wanted.max_seqlen_k)
        assert metadata.slot_mapping.tolist() == group.slot_mapping.tolist() + [0] * padding
        width = group.block_table.shape[1]
        cells = metadata.block_table.numpy()
        assert np.array_equal(cells[:count, :width], group.block_table)
        assert not cells[:, width:].any() and not cells[count:].any()
        for tensor in (metadata.seqused_k, metadata.block_table, metadata.cu_seqlens_q):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def run(sequences: Sequences, batch: DecodeBatch, plan: StepPlan) -> None:
    assert only_decodes(plan)
    apply_diff(sequences.table, plan)
    check(batch, sequences.table, plan)
    sequences.sampled(plan)


def test_a_batch_that_goes_on():
    sequences = Sequences(1)
    batch = DecodeBatch(3, 2, BLOCK_SIZE, CPU, num_blocks=1)
    run(sequences, batch, sequences.plan([], 3))
    positions = batch.positions
    for _ in range(100):
        run(sequences, batch, sequences.plan([], 0))
    assert batch.positions is positions and positions.is_contiguous()


def test_sequences_come_go_and_pause():
    for seed in range(20):
        sequences = Sequences(seed)
        batch = DecodeBatch(8, 2, BLOCK_SIZE, CPU, num_blocks=2)
        for _ in range(40):
            names = list(sequences.lengths)
            dropped = sequences.random.sample(names, sequences.random.choice([0, 0, 0, len(names) // 2]))
            left = len(names) - len(dropped)
            added = sequences.random.choice([0, 0, 8 - left])
            skipped = sequences.random.choice([0, 0, left // 2])
            if left + added:
                run(sequences, batch, sequences.plan(dropped, added, skipped))


def test_other_sequences_of_the_same_rows():
    """Rows are reused: what stood in them must not be taken for what stands there now."""
    sequences = Sequences(3)
    batch = DecodeBatch(4, 2, BLOCK_SIZE, CPU)
    run(sequences, batch, sequences.plan([], 2))
    run(sequences, batch, sequences.plan(["s0", "s1"], 2))
    run(sequences, batch, sequences.plan([], 0, skipped=1))
    run(sequences, batch, sequences.plan([], 0))


def test_the_same_position_again():
    """As the calibration does it."""
    sequences = Sequences(4)
    batch = DecodeBatch(1, 2, BLOCK_SIZE, CPU)
    plan = sequences.plan([], 1)
    apply_diff(sequences.table, plan)
    for _ in range(3):
        check(batch, sequences.table, plan)
        sequences.table.append([sequences.table[RequestId("s0")]], [7])
