"""An executor on a thread of its own, so that the model computes while the engine schedules and delivers."""

import threading
from queue import SimpleQueue

from ...cluster.kv_layout import KvLayout
from ..engine.executor import Executor
from ..engine.plan import StepPlan, StepResult


class ThreadedExecutor:
    """Runs the steps of ``inner`` as soon as they are submitted, all on one thread. Implements ``Executor``.

    One thread also because OpenMP keeps a pool of threads for each thread that calls it.
    """

    max_in_flight = 2

    def __init__(self, inner: Executor) -> None:
        """Takes an executor that computes when its result is asked for, and whose results tell of errors."""
        self._inner = inner
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="warmroot-model", daemon=True)
        self._thread.start()

    @property
    def layout(self) -> KvLayout:
        """See ``Executor``."""
        return self._inner.layout

    @property
    def num_blocks(self) -> int:
        """See ``Executor``."""
        return self._inner.num_blocks

    @property
    def chains(self) -> bool:
        """See ``Executor``."""
        return self._inner.chains

    def submit(self, plan: StepPlan) -> None:
        """Start a step, behind those submitted before."""
        self._plans.put(plan)

    def result(self) -> StepResult:
        """Wait for the oldest step."""
        return self._results.get()

    def shutdown(self) -> None:
        """Stop after the steps submitted so far and release the inner executor."""
        self._plans.put(None)
        self._thread.join()
        self._inner.shutdown()

    def _run(self) -> None:
        for plan in iter(self._plans.get, None):
            self._inner.submit(plan)
            self._results.put(self._inner.result())
