"""A model that runs in several processes, as one executor."""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from ...cluster.errors import RankLostError
from ...cluster.expert_balance import ExpertBalance
from ...cluster.kv_layout import KvLayout
from ...cluster.messages import RankInfo
from ...cluster.weights_update import NewWeights
from ..engine.plan import StepPlan, StepResult
from .gang_config import GangConfig, Meeting, RankReport, RankTimes, StoreAddress
from .plan_sender import PlanSender
from .pulse import SILENCE_S

Progress = Callable[[int, int], None]
"""Told how many bytes of weights all ranks together have loaded, and of how many."""

logger = logging.getLogger(__name__)


class Crew(Protocol):
    """The processes of a gang's ranks, wherever they run."""

    @property
    def config(self) -> GangConfig:
        """What they run."""
        ...

    @property
    def address(self) -> str:
        """Of this machine, as the ranks reach it."""
        ...

    def serve_store(self) -> StoreAddress:
        """Let rank 0 serve the store. Raises RankLostError."""
        ...

    def join(self, meeting: Meeting, progress: Progress) -> list[RankReport]:
        """Wait until every rank is ready, then let them connect. Raises what a rank raised, RankLostError."""
        ...

    def times(self) -> list[RankTimes]:
        """Of all ranks, in order. Raises RankLostError."""
        ...

    def prepare(self, new: NewWeights) -> str:
        """Have every rank load its part of other weights; returns their form.

        Raises what a rank raised, RankLostError.
        """
        ...

    def discard(self) -> None:
        """Have every rank drop what it prepared. Raises RankLostError."""
        ...

    def kill(self) -> None:
        """End all processes at once, without waiting. Thread-safe."""
        ...

    def end(self) -> None:
        """Return when all processes have ended: by themselves within a while, or else by force. Idempotent."""
        ...


class GangExecutor:
    """Sends plans to all ranks and takes the result of those that sample. Implements ``GroupedExecutor``.

    A gang lives and dies whole: with a rank that is lost, or a step that fails, all processes end. Where there are more
    ranks of experts than of attention, there are ``num_groups`` with plans of their own: see ``start_engines``.
    """

    chains = False

    def __init__(
        self,
        crew: Crew,
        sender: PlanSender,
        reports: list[RankReport],
        lost: "Future[RankLostError] | None" = None,
    ) -> None:
        """Takes a crew that has joined and its control plane; ``start_gang`` makes them."""
        self.reports = reports
        self.lost = lost or Future()
        """Done when a rank is lost, also while no step runs; its callbacks come from another thread."""
        self.max_in_flight = crew.config.topology.pp
        self._crew = crew
        self._sender = sender
        self._steps: deque[int] = deque()
        self._failure: str | None = None

    @property
    def layout(self) -> KvLayout:
        """See ``Executor``."""
        return self.reports[0].layout

    @property
    def num_blocks(self) -> int:
        """See ``Executor``."""
        return self.reports[0].num_blocks

    @property
    def num_groups(self) -> int:
        """See ``GroupedExecutor``."""
        return self._crew.config.topology.attention_dp

    def submit(self, plan: StepPlan) -> None:
        """Send a plan, with several groups to the first of them. A loss shows in its result."""
        self.submit_all([plan, *[StepPlan(step=plan.step)] * (self.num_groups - 1)])

    def submit_all(self, plans: Sequence[StepPlan]) -> None:
        """Send each group its plan. A loss shows in the step's result."""
        step = plans[0].step
        self._steps.append(step)
        try:
            self._sender.send(*plans)
        except RankLostError as error:
            logger.error("step %d cannot start: %s", step, error)

    def result(self) -> StepResult:
        """Wait for the oldest step. A lost rank or a missed deadline becomes its ``error``."""
        step = self._steps.popleft()
        if self._failure is None:
            try:
                result = self._sender.result()
            except RankLostError as error:
                result = StepResult(step=step, error=error.message)
            if result.error is None:
                return result
            self._failure = result.error
            logger.error("step %d failed, the gang ends: %s", step, result.error)
            self._crew.kill()
        return StepResult(step=step, error=self._failure)

    def shutdown(self) -> None:
        """Let the ranks go, and return when their processes have ended. Idempotent."""
        self._sender.close()
        self._crew.end()

    def prepare(self, new: NewWeights) -> str:
        """See ``Crew``. While steps run."""
        return self._crew.prepare(new)

    def discard(self) -> None:
        """See ``Crew``."""
        self._crew.discard()

    def times(self) -> list[RankTimes]:
        """What the ranks spend their time on. Raises RankLostError."""
        return self._crew.times()

    def experts(self) -> list[ExpertBalance]:
        """How the experts are loaded, by layer, as far as they have been looked at. Raises RankLostError."""
        return sorted((found for times in self.times() for found in times.experts), key=lambda found: found.layer)

    def ranks(self) -> list[RankInfo]:
        """All ranks, in order."""
        progress = self._sender.progress()
        topology = self._crew.config.topology
        return [
            RankInfo(
                rank=report.rank,
                stage=topology.place(report.rank).stage,
                host=report.host,
                pid=report.pid,
                memory_bytes=report.peak_memory_bytes,
                last_step=progress.get(f"rank {report.rank}", 0),
            )
            for report in self.reports
        ]


def start_gang(
    crew: Crew, progress: Progress = lambda done, total: None, *, silence_s: float = SILENCE_S
) -> GangExecutor:
    """Bring a crew together. Raises ModelLoadError, ConfigError, and RankLostError, after all processes have ended."""
    config, topology, token = crew.config, crew.config.topology, secrets.token_hex(16)
    lost: Future[RankLostError] = Future()

    def on_lost(error: RankLostError) -> None:
        crew.kill()
        lost.set_result(error)

    sender = PlanSender(
        topology.world_size,
        token,
        host=crew.address,
        sampling_ranks=topology.sampling_ranks,
        groups=topology.attention_groups,
        deadline_s=config.step_s,
        silence_s=silence_s,
        on_lost=on_lost,
    )
    try:
        reports = crew.join(Meeting(crew.serve_store(), sender.addresses, token), progress)
        sender.accept(config.step_s)
    except BaseException:
        crew.kill()
        sender.close()
        crew.end()
        raise
    return GangExecutor(crew, sender, reports, lost)
