"""Sequence tables and packed batches, without a model."""

import numpy as np
import pytest

from warmroot.actors.engine.plan import NewSequence, SequenceStep, StepPlan
from warmroot.actors.runner.batch import apply_diff, pack
from warmroot.actors.runner.sequences import SequenceTable, Table
from warmroot.cluster.ids import BlockId, RequestId
from warmroot.cluster.sampling_params import SamplingParams

BLOCK_SIZE = 4


def new(request_id: str, tokens: list[int], *tables: list[int], num_prompt: int | None = None, **params) -> NewSequence:
    return NewSequence(
        request_id=RequestId(request_id),
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        params=SamplingParams(**params),
        seed=1,
        num_computed=0,
        block_tables=tuple([BlockId(block) for block in table] for table in tables),
    )


def step(request_id: str, num_computed: int, num_tokens: int, *blocks: list[int], samples: bool = True) -> SequenceStep:
    return SequenceStep(
        request_id=RequestId(request_id),
        num_computed=num_computed,
        num_tokens=num_tokens,
        samples=samples,
        new_blocks=tuple([BlockId(block) for block in table] for table in blocks),
    )


def ids(*names: str) -> tuple[RequestId, ...]:
    return tuple(RequestId(name) for name in names)


def test_a_step_with_decodes_prefills_and_two_groups():
    table = SequenceTable(2)
    first = StepPlan(step=1, new=(new("a", [10, 11, 12, 13, 14], [3, 5], [4, 6]),), sequences=(step("a", 0, 5),))
    apply_diff(table, first)
    table.append([table[RequestId("a")]], [15])
    plan = StepPlan(
        step=2,
        new=(new("b", list(range(20, 31)), [0, 9, 7], [1, 2, 8]),),
        sequences=(step("a", 5, 1), step("b", 2, 6, samples=False)),
    )
    apply_diff(table, plan)
    batch = pack(table, plan, BLOCK_SIZE)
    assert batch.token_ids.tolist() == [15, 22, 23, 24, 25, 26, 27]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 6, 7]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 7] and batch.cu_seqlens_q.dtype == np.int32
    assert batch.seqused_k.tolist() == [6, 8]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (6, 8)
    assert batch.groups[0].block_table.tolist() == [[3, 5], [0, 9]]
    assert batch.groups[1].block_table.tolist() == [[4, 6], [1, 2]]
    assert batch.groups[0].slot_mapping.tolist() == [21, 2, 3, 36, 37, 38, 39]
    assert batch.groups[1].slot_mapping.tolist() == [25, 6, 7, 8, 9, 10, 11]
    assert [state.request_id for state in batch.sampled] == ["a"]
    assert batch.sampled_rows.tolist() == [0]


def test_sampled_rows_are_last_tokens():
    table = SequenceTable(1)
    plan = StepPlan(
        step=1,
        new=(new("a", [1, 2, 3], [1]), new("b", [4, 5, 6, 7], [2]), new("c", [8, 9], [3])),
        sequences=(step("a", 0, 3), step("b", 0, 2, samples=False), step("c", 0, 2)),
    )
    apply_diff(table, plan)
    batch = pack(table, plan, BLOCK_SIZE)
    assert batch.sampled_rows.tolist() == [2, 6]
    assert batch.token_ids[batch.sampled_rows].tolist() == [3, 9]


def test_new_blocks_are_appended():
    table = SequenceTable(1)
    apply_diff(table, StepPlan(step=1, new=(new("a", [1, 2, 3, 4], [7]),), sequences=(step("a", 0, 4),)))
    table.append([table[RequestId("a")]], [5])
    plan = StepPlan(step=2, sequences=(step("a", 4, 1, [2]),))
    apply_diff(table, plan)
    batch = pack(table, plan, BLOCK_SIZE)
    assert batch.groups[0].block_table.tolist() == [[7, 2]]
    assert batch.groups[0].slot_mapping.tolist() == [8]


def test_preempted_sequence_comes_back_and_rows_are_reused_clean():
    table = SequenceTable(1)
    apply_diff(table, StepPlan(step=1, new=(new("a", [1] * 12, [1, 2, 3]), new("b", [2] * 4, [4]))))
    assert len(table) == 2
    back = new("a", [1] * 12 + [9], [5, 6, 7, 8], num_prompt=12)
    plan = StepPlan(step=2, finished=ids("a", "b", "unknown"), new=(back,), sequences=(step("a", 0, 13),))
    apply_diff(table, plan)
    assert len(table) == 1 and table[RequestId("a")].num_output == 1
    assert pack(table, plan, BLOCK_SIZE).groups[0].block_table.tolist() == [[5, 6, 7, 8]]
    apply_diff(table, StepPlan(step=3, finished=ids("a"), new=(new("c", [3], [9]), new("d", [4] * 9, [1, 2, 3]))))
    plan = StepPlan(step=3, sequences=(step("c", 0, 1), step("d", 0, 9)))
    # Cells past a sequence's blocks stand for no block, whatever the row held before.
    assert pack(table, plan, BLOCK_SIZE).groups[0].block_table.tolist() == [[9, 0, 0], [1, 2, 3]]


def test_history_grows_past_every_size():
    table = SequenceTable(1, rows=1, columns=2)
    apply_diff(table, StepPlan(step=1, new=(new("a", [1, 2, 3], [1]), new("b", [4], [2]))))
    states = [table[name] for name in ids("a", "b")]
    for token in range(100, 140):
        table.append(states, [token, token + 1000])
    assert table.history(states[0]).tolist() == [1, 2, 3, *range(100, 140)]
    assert table.history(states[1]).tolist() == [4, *range(1100, 1140)]
    assert states[1].num_output == 40


def test_prompt_logprobs_are_wanted_once():
    table = SequenceTable(1)
    fresh = new("a", [1, 2], [1], prompt_logprobs=1)
    resumed = new("b", [1, 2, 3], [2], num_prompt=2, prompt_logprobs=1)
    apply_diff(table, StepPlan(step=1, new=(fresh, resumed, new("c", [1], [3]))))
    assert [table[name].wants_prompt_logprobs for name in ids("a", "b", "c")] == [True, False, False]


@pytest.mark.parametrize(("rows", "columns", "shape"), [(1, 1, (2, 3)), (3, 1, (4, 3)), (2, 20, (2, 20))])
def test_table_grows(rows, columns, shape):
    table = Table(2, 3)
    table.cells[:] = 7
    table.reserve(rows, columns)
    assert table.cells.shape == shape
    assert table.cells[:2, :3].tolist() == [[7] * 3] * 2 and table.cells.sum() == 42
