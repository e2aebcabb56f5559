"""What the steps of a gang went into, from what its ranks say of themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

Window = Mapping[str, Any]
"""What ``GangBackend.decode`` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
    """Milliseconds of one rank in a step of the gang."""

    compute_ms: float
    communication_ms: float
    """In sums, gathers, exchanges and hops, waiting for the other ranks included."""
    bubble_ms: float
    """With a plan, but waiting for the hidden states of the stage before."""
    control_ms: float
    """Taking in plans and answering."""
    idle_ms: float
    """Without a plan."""
    cpu_ms: float
    """Processor time: more than the time in the model where ranks spin, less where others use the machine."""

    @classmethod
    def of(cls, seconds: Mapping[str, float], num_steps: int) -> "RankSplit":
        """From the growth of a rank's ``RankTimes`` over ``num_steps``."""
        scale = 1e3 / num_steps
        communication = seconds["communication_s"]
        return cls(
            compute_ms=scale * (seconds["busy_s"] - communication),
            communication_ms=scale * communication,
            bubble_ms=scale * seconds["bubble_s"],
            control_ms=scale * seconds["control_s"],
            idle_ms=scale * seconds["idle_s"],
            cpu_ms=scale * seconds["cpu_s"],
        )

    @property
    def work_ms(self) -> float:
        """In the model."""
        return self.compute_ms + self.communication_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSplit:
    """The ranks of a gang in one window of steps; all times are milliseconds of a step."""

    step_ms: float
    engine_ms: float
    """Scheduling and accounting, as without a gang."""
    ranks: list[RankSplit]
    stages: list[int]
    """The stage of each rank."""

    @classmethod
    def of(cls, window: Window, stages: Sequence[int]) -> "GangSplit":
        """From one window."""
        num_steps = window["num_steps"]
        return cls(
            step_ms=1e3 * window["wall_s"] / num_steps,
            engine_ms=1e3 * window["engine_s"] / num_steps,
            ranks=[RankSplit.of(seconds, num_steps) for seconds in window["ranks"]],
            stages=list(stages),
        )

    @property
    def busy_shares(self) -> list[float]:
        """By stage: the part of the time that its ranks are in the model."""
        return [
            mean(rank.work_ms for rank, where in zip(self.ranks, self.stages, strict=True) if where == stage)
            / self.step_ms
            for stage in range(max(self.stages) + 1)
        ]

    @property
    def bubble_share(self) -> float:
        """Of all ranks' time, what they wait for hidden states or plans, on top of communication and control."""
        return mean((rank.bubble_ms + rank.idle_ms) / self.step_ms for rank in self.ranks)

    @property
    def control_share(self) -> float:
        """Of a step that runs alone, what is neither the engine's nor any stage's: plans, results and wake-ups."""
        work = sum(max(rank.work_ms for rank in self._of_stage(stage)) for stage in set(self.stages))
        return 1.0 - (work + self.engine_ms) / self.step_ms

    def _of_stage(self, stage: int) -> list[RankSplit]:
        return [rank for rank, where in zip(self.ranks, self.stages, strict=True) if where == stage]


def median_split(splits: Sequence[GangSplit]) -> GangSplit:
    """Figure by figure."""
    return GangSplit(
        step_ms=median(split.step_ms for split in splits),
        engine_ms=median(split.engine_ms for split in splits),
        ranks=[
            RankSplit(**{name: median(getattr(rank, name) for rank in turns) for name in RankSplit.__slots__})
            for turns in zip(*(split.ranks for split in splits), strict=True)
        ],
        stages=splits[0].stages,
    )


def byte_error(traffic: Sequence[Mapping[str, Mapping[str, float]]], kinds: Sequence[str]) -> float:
    """The largest difference between counted and predicted bytes of any rank, over the predicted ones."""
    return max(
        (
            abs(rank["counted"].get(kind, 0) - rank["predicted"].get(kind, 0)) / max(rank["predicted"].get(kind, 0), 1)
            for rank in traffic
            for kind in kinds
        ),
        default=0.0,
    )
