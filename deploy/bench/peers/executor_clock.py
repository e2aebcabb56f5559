"""An executor that is watched: how long the engine spends in it, and how large the plans are."""

import time
from collections.abc import Sequence

from ....actors.engine.executor import Executor
from ....actors.engine.joint import GroupedExecutor
from ....actors.engine.plan import StepPlan, StepResult
from ....cluster.kv_layout import KvLayout

PlanSize = tuple[int, int]
"""Tokens of a plan, and how many of them get logits."""


class ExecutorClock:
    """Stands before an executor of one or several groups. Implements ``GroupedExecutor``."""

    def __init__(self, inner: Executor | GroupedExecutor) -> None:
        self.seconds = 0.0
        """Spent in ``submit`` and ``result``."""
        self.plans: list[list[PlanSize]] = []
        """Of each step, by group."""
        self._inner = inner

    @property
    def layout(self) -> KvLayout:
        """See ``Executor``."""
        return self._inner.layout

    @property
    def num_blocks(self) -> int:
        """See ``Executor``."""
        return self._inner.num_blocks

    @property
    def max_in_flight(self) -> int:
        """See ``Executor``."""
        return self._inner.max_in_flight

    @property
    def chains(self) -> bool:
        """See ``Executor``."""
        return self._inner.chains

    @property
    def num_groups(self) -> int:
        """See ``GroupedExecutor``."""
        return getattr(self._inner, "num_groups", 1)

    def submit(self, plan: StepPlan) -> None:
        """See ``Executor``."""
        self.submit_all([plan])

    def submit_all(self, plans: Sequence[StepPlan]) -> None:
        """See ``GroupedExecutor``."""
        began = time.perf_counter()
        if len(plans) == 1:
            self._inner.submit(plans[0])
        else:
            self._inner.submit_all(plans)  # pyright: ignore[reportAttributeAccessIssue]
        self.seconds += time.perf_counter() - began
        self.plans.append([(plan.num_tokens, sum(step.samples for step in plan.sequences)) for plan in plans])

    def result(self) -> StepResult:
        """See ``Executor``."""
        began = time.perf_counter()
        result = self._inner.result()
        self.seconds += time.perf_counter() - began
        return result

    def shutdown(self) -> None:
        """See ``Executor``."""
        self._inner.shutdown()
