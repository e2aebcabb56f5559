"""What the engine needs of whatever runs the model: a local runner, a shard group, or a simulator."""

from typing import Protocol

from ...cluster.kv_layout import KvLayout
from .plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in order. ``submit`` may return before the step is done; ``result`` waits for the oldest."""

    @property
    def layout(self) -> KvLayout:
        """KV groups of the model."""
        ...

    @property
    def num_blocks(self) -> int:
        """Pages in the pool, the null page included."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Submitted steps that it makes use of at once; with 1 the next one waits for the result of this."""
        ...

    @property
    def chains(self) -> bool:
        """Whether a sequence should decode in a step while an earlier one still samples the token that this needs."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step."""
        ...

    def result(self) -> StepResult:
        """Wait for the oldest submitted step."""
        ...

    def shutdown(self) -> None:
        """Release memory and processes."""
        ...
