"""Engines that step together, over one scripted executor a group."""

from collections.abc import Sequence

from engine_harness import NAMESPACE, Harness, ScriptedExecutor

from warmroot.actors.engine.joint import JointEngine
from warmroot.actors.engine.plan import StepPlan, StepResult


class ScriptedGroups:
    """A ``GroupedExecutor``. Every group takes part in every step."""

    def __init__(self, groups: list[ScriptedExecutor]) -> None:
        self.groups = groups
        self.num_groups = len(groups)
        self.layout = groups[0].layout
        self.num_blocks = groups[0].num_blocks
        self.max_in_flight = groups[0].max_in_flight
        self.chains = groups[0].chains

    def submit(self, plan: StepPlan) -> None:
        raise AssertionError("each group has a plan of its own")

    def submit_all(self, plans: Sequence[StepPlan]) -> None:
        assert len({plan.step for plan in plans}) == 1 and any(plan.sequences for plan in plans)
        for group, plan in zip(self.groups, plans, strict=True):
            group.submit(plan)

    def result(self) -> StepResult:
        results = [group.result() for group in self.groups]
        errors = [result.error for result in results if result.error is not None]
        sequences = [row for result in results for row in result.sequences]
        return StepResult(step=results[0].step, sequences=sequences, error=errors[0] if errors else None)

    def shutdown(self) -> None:
        """Nothing is held."""


class JointHarness(Harness):
    def __init__(self, num_groups: int = 2, **options) -> None:
        super().__init__(**options)
        one = self.executor
        self.executor = ScriptedGroups(
            [
                ScriptedExecutor(one.layout, one.num_blocks, one.vocab_size, one.fail_at, one.max_in_flight, one.chains)
                for _ in range(num_groups)
            ]
        )
        self.engine = JointEngine(self.executor, self.engine.config, self.clock, NAMESPACE)

    def check(self) -> None:
        """The events are those of the union."""
        cached = [
            self.check_engine(engine, executor)
            for engine, executor in zip(self.engine.engines, self.executor.groups, strict=True)
        ]
        self.replay()
        assert set(self.known) == set[bytes]().union(*cached)
        snapshot = [block for event in self.engine.snapshot_events() for block in event.hashes]
        assert len(snapshot) == len(set(snapshot)) and set(snapshot) == set(self.known)

    def homes(self) -> dict[str, int]:
        """The group of each request that has been in a plan."""
        return {
            step.request_id: group
            for group, executor in enumerate(self.executor.groups)
            for plan in executor.plans
            for step in plan.sequences
        }
