"""Our runner alone, without an engine: what a decode batch or a prefill chunk of some size costs.

Pages are filled with copies of a few real ones: a step costs what it costs whatever the keys are, as long as the
memory behind them is real. Decodes advance from step to step, as an engine's do.
"""

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

from ....actors.engine.plan import NewSequence, SequenceStep, StepPlan
from ....cluster.errors import EngineError
from ....cluster.ids import BlockId, RequestId
from ....cluster.sampling_params import SamplingParams
from .protocol import serve
from .warmroot_model import facts, load

_MOST_STEPS, _LEAST_STEPS, _WARM_UP_STEPS = 32, 3, 2
_SOURCE_BLOCKS = 4
_COPIES_PER_STEP = 64


class CurveBackend:
    """See ``warmroot_model.load`` for the settings; ``seconds`` bounds each measurement."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._runner = load(settings)
        self._seconds: float = settings["seconds"]
        self._steps = itertools.count(1)
        self._rng = random.Random(settings["seed"])
        self._num_filled = 0
        self.facts = {
            **facts(settings, self._runner),
            "context": self._runner.decoder.spec.max_position,
            "driver": "ModelRunner, greedy sampling included",
        }

    def decode(self, batch: int, context: int) -> list[float] | None:
        """Seconds of each step in which ``batch`` sequences of about ``context`` tokens decode; None: no room."""
        first = max(0, context - _WARM_UP_STEPS - _MOST_STEPS)
        if not self._reserve(batch, context):
            return None
        new = tuple(self._sequence(index, context, first + 1, first) for index in range(batch))
        moments = self._timed(self._decode_plans(new, first))
        self._drop(new)
        return moments[_WARM_UP_STEPS:]

    def prefill(self, length: int) -> list[float] | None:
        """Seconds of each step that computes a prompt of ``length`` tokens; None: no room."""
        if not self._reserve(1, length):
            return None
        new = (self._sequence(0, length, length, 0),)
        moments = self._timed(self._prefill_plans(new, length))
        self._drop(new)
        return moments[_WARM_UP_STEPS:]

    def _decode_plans(self, new: tuple[NewSequence, ...], first: int) -> Iterator[StepPlan]:
        for position in range(first, first + _WARM_UP_STEPS + _MOST_STEPS):
            yield self._plan(new if position == first else (), new, position, 1)

    def _prefill_plans(self, new: tuple[NewSequence, ...], length: int) -> Iterator[StepPlan]:
        while True:
            yield self._plan(new, new, 0, length)

    def _plan(
        self, new: tuple[NewSequence, ...], live: tuple[NewSequence, ...], num_computed: int, num_tokens: int
    ) -> StepPlan:
        sequences = tuple(
            SequenceStep(
                request_id=sequence.request_id,
                num_computed=num_computed,
                num_tokens=num_tokens,
                samples=True,
                new_blocks=(),
            )
            for sequence in live
        )
        return StepPlan(
            step=next(self._steps),
            finished=tuple(sequence.request_id for sequence in new),
            new=new,
            sequences=sequences,
        )

    def _timed(self, plans: Iterator[StepPlan]) -> list[float]:
        moments: list[float] = []
        for plan in plans:
            moments.append(self._run(plan))
            if len(moments) >= _WARM_UP_STEPS + _LEAST_STEPS and sum(moments[_WARM_UP_STEPS:]) > self._seconds:
                break
        return moments

    def _run(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        self._runner.submit(plan)
        result = self._runner.result()
        if result.error is not None:
            raise EngineError(result.error)
        return time.perf_counter() - began

    def _drop(self, sequences: tuple[NewSequence, ...]) -> None:
        finished = tuple(sequence.request_id for sequence in sequences)
        self._run(StepPlan(step=next(self._steps), finished=finished))

    def _sequence(self, index: int, capacity: int, num_tokens: int, num_computed: int) -> NewSequence:
        """Sequence ``index`` of some that have room for ``capacity`` tokens each."""
        layout = self._runner.layout
        groups, blocks = len(layout.groups), -(-capacity // layout.block_size)
        base = 1 + index * blocks * groups
        return NewSequence(
            request_id=RequestId(f"curve-{index}"),
            token_ids=self._rng.choices(range(self._runner.decoder.spec.vocab_size), k=num_tokens),
            num_prompt_tokens=num_tokens,
            params=SamplingParams(temperature=0.0),
            seed=0,
            num_computed=num_computed,
            block_tables=tuple(
                [BlockId(base + block * groups + group) for block in range(blocks)] for group in range(groups)
            ),
        )

    def _reserve(self, batch: int, capacity: int) -> bool:
        """Fill the pages of ``batch`` sequences with something; False if there are not so many."""
        layout = self._runner.layout
        end = 1 + batch * -(-capacity // layout.block_size) * len(layout.groups)
        if end > self._runner.num_blocks or capacity > self._runner.decoder.spec.max_position:
            return False
        source = _SOURCE_BLOCKS * len(layout.groups)
        if not self._num_filled:
            tokens = _SOURCE_BLOCKS * layout.block_size
            new = (self._sequence(0, tokens, tokens, 0),)
            self._run(self._plan(new, new, 0, tokens))
            self._drop(new)
            self._num_filled = 1 + source
        for start in range(self._num_filled, end, _COPIES_PER_STEP):
            pages = range(start, min(start + _COPIES_PER_STEP, end))
            copies = tuple((BlockId(1 + page % source), BlockId(page)) for page in pages)
            self._run(StepPlan(step=next(self._steps), copies=copies))
        self._num_filled = max(self._num_filled, end)
        return True


if __name__ == "__main__":
    serve(CurveBackend)
