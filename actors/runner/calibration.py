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
_NUM_TOKENS = 64
"""Different tokens of the prompt: equal ones would all go to the same experts."""


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
    layout = executor.layout
    blocks = min(-(-(max_tokens + 1) // layout.block_size), (executor.num_blocks - 1) // len(layout.groups))
    length = min(max_tokens, max(1, blocks * layout.block_size - 1))
    _timed(executor, _prefill(layout, 1, length, blocks))
    prefill_s = _timed(executor, _prefill(layout, 2, length, blocks))
    # The same position again and again: it costs what the next ones would.
    position = min(length, blocks * layout.block_size - 1)
    decodes = [_timed(executor, _decode(3 + index, position)) for index in range(_NUM_DECODES)]
    executor.submit(StepPlan(step=3 + _NUM_DECODES, finished=(_ID,)))
    executor.result()
    return Calibration(length / prefill_s, sorted(decodes)[_NUM_DECODES // 2])


def _prefill(layout: KvLayout, step: int, length: int, blocks: int) -> StepPlan:
    groups = len(layout.groups)
    new = NewSequence(
        request_id=_ID,
        token_ids=[position % _NUM_TOKENS for position in range(length)],
        num_prompt_tokens=length,
        params=SamplingParams(temperature=0.0),
        seed=0,
        num_computed=0,
        block_tables=tuple([BlockId(1 + index * groups + group) for index in range(blocks)] for group in range(groups)),
    )
    return StepPlan(step=step, finished=(_ID,), new=(new,), sequences=(_advance(0, length),))


def _decode(step: int, position: int) -> StepPlan:
    return StepPlan(step=step, sequences=(_advance(position, 1),))


def _advance(num_computed: int, num_tokens: int) -> SequenceStep:
    return SequenceStep(request_id=_ID, num_computed=num_computed, num_tokens=num_tokens, samples=True, new_blocks=())


def _timed(executor: Executor, plan: StepPlan) -> float:
    began = time.perf_counter()
    executor.submit(plan)
    result = executor.result()
    if result.error is not None:
        raise RuntimeError(f"calibration failed: {result.error}")
    return time.perf_counter() - began
