"""How fast a runner is, measured on steps like those it will serve."""

import time
from dataclasses import dataclass

from ...cluster.ids import BlockId, RequestId
from ...cluster.kv_layout import KvLayout
from ...cluster.sampling_params import SamplingParams
from ..engine.executor import Executor
from ..engine.plan import NewSequence, SequenceStep, StepPlan

_ID = RequestId("calibration")
_NUM_DECODES = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates of one replica."""

    prefill_tokens_per_s: float
    decode_step_s: float
    """One step of a single stream."""


def calibrate(executor: Executor, *, max_tokens: int = 256) -> Calibration:
    """Run a prompt of up to ``max_tokens`` tokens twice (the first warms up), then decode after it.

    Writes to the executor's pages, so do it before an engine uses them. Raises RuntimeError when a step fails.
    """
    length = min(max_tokens, _longest(executor) - _NUM_DECODES - 1)
    length = max(1, length)
    _timed(executor, _prefill(executor.layout, 1, length))
    prefill_s = _timed(executor, _prefill(executor.layout, 2, length))
    decodes = [_timed(executor, _decode(executor.layout, 3 + i, length + i)) for i in range(_NUM_DECODES)]
    executor.submit(StepPlan(step=0, finished=(_ID,)))
    executor.result()
    return Calibration(length / prefill_s, sorted(decodes)[_NUM_DECODES // 2])


def _longest(executor: Executor) -> int:
    """Tokens of a sequence that has all pages, none given back behind windows."""
    layout = executor.layout
    return (executor.num_blocks - 1) // len(layout.groups) * layout.block_size


def _blocks(layout: KvLayout, first: int, last: int) -> tuple[list[BlockId], ...]:
    """Per group, its own pages for the blocks ``first`` to ``last``."""
    groups = len(layout.groups)
    return tuple([BlockId(1 + index * groups + group) for index in range(first, last)] for group in range(groups))


def _prefill(layout: KvLayout, step: int, length: int) -> StepPlan:
    new = NewSequence(
        request_id=_ID,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        params=SamplingParams(temperature=0.0),
        seed=0,
        num_computed=0,
        block_tables=_blocks(layout, 0, -(-length // layout.block_size)),
    )
    return StepPlan(step=step, finished=(_ID,), new=(new,), sequences=(_advance(0, length, ()),))


def _decode(layout: KvLayout, step: int, position: int) -> StepPlan:
    block, offset = divmod(position, layout.block_size)
    new_blocks = () if offset else _blocks(layout, block, block + 1)
    return StepPlan(step=step, sequences=(_advance(position, 1, new_blocks),))


def _advance(num_computed: int, num_tokens: int, new_blocks: tuple[list[BlockId], ...]) -> SequenceStep:
    return SequenceStep(
        request_id=_ID, num_computed=num_computed, num_tokens=num_tokens, samples=True, new_blocks=new_blocks
    )


def _timed(executor: Executor, plan: StepPlan) -> float:
    began = time.perf_counter()
    executor.submit(plan)
    result = executor.result()
    if result.error is not None:
        raise RuntimeError(f"calibration failed: {result.error}")
    return time.perf_counter() - began
