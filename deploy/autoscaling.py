"""Serve's autoscaling policy: in the controller, it has ``cluster/scaling.py`` decide from what routers told the desk.

Written against ray 2.60. Serve calls it about ten times a second and pickles this module by value, so that it must not
hold anything that cannot be pickled, nor import when it is called. Serve's own delays are 0 (``serve_config.py``).
"""

import logging
import time
from concurrent.futures import Future
from typing import Any

import ray
from ray.serve.config import AutoscalingContext

from ..actors.scaling_desk import TELL_S
from ..cluster.autoscaling_config import AutoscalingConfig
from ..cluster.demand import Demand, DemandMeter
from ..cluster.scaling import Decision, Moment, ScalingState, decide
from ..cluster.time_limits import TimeLimits
from ..router.serve_router import BUS_ACTOR, BUS_NAMESPACE

_ANSWER_S = 5.0
"""A desk that does not answer for so long is looked up again."""
_START_TIMEOUT_S: float = TimeLimits.model_fields["replica_start_timeout"].default

logger = logging.getLogger("ray.serve")


class ScalingPolicy:
    """One model's. What it remembers begins anew with the controller; it then waits for whole delays."""

    def __init__(self, model: str, replica_start_timeout: float = _START_TIMEOUT_S, **keys: Any) -> None:
        """``keys`` are those of ``AutoscalingConfig``; the numbers of replicas come with each call."""
        self._model = model
        self._give_up_s = replica_start_timeout
        self._config = AutoscalingConfig.model_validate(keys)
        self._meter = DemandMeter()
        self._state = ScalingState()
        self._decided: Decision | None = None
        self._answer: Future[list[Demand]] | None = None
        self._asked_at = float("-inf")
        self._desk: Any = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there shall be. Never raises: the controller would not get round to anything else."""
        try:
            return self._decide(context), {}
        except Exception:
            logger.exception("autoscaling of %s failed; it stays as it is", self._model)
            return context.target_num_replicas, {}

    def _decide(self, context: AutoscalingContext) -> int:
        now = time.monotonic()
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer, None
            return self._hear(answer, context, now)
        if now - self._asked_at > _ANSWER_S:
            self._answer = self._desk = None
        if self._answer is None and now - self._asked_at >= TELL_S:
            self._ask(now)
        return context.target_num_replicas

    def _ask(self, now: float) -> None:
        self._asked_at = now
        try:
            self._desk = self._desk or ray.get_actor(BUS_ACTOR, BUS_NAMESPACE)
        except ValueError:
            return  # no ingress has started yet
        self._answer = self._desk.ask_demand.remote(self._model, self._decided).future()
        self._decided = None

    def _hear(self, answer: "Future[list[Demand]]", context: AutoscalingContext, now: float) -> int:
        try:
            demands = answer.result()
        except Exception as error:
            logger.warning("what %s has to do is not known: %s", self._model, error)
            self._desk, demands = None, []
        for demand in demands:
            self._meter.hear(demand, now)
        moment = Moment(
            ready=context.current_num_replicas,
            target=context.target_num_replicas,
            now=now,
            wall=time.time(),
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
            give_up_s=self._give_up_s,
        )
        decision, self._state = decide(self._config, self._meter.figures(now), self._state, moment)
        self._decided = decision
        if decision.target != decision.before:
            logger.info(
                "autoscaling %s from %d to %d replicas: %s",
                self._model,
                decision.before,
                decision.target,
                "; ".join(decision.reasons),
            )
        return decision.target
