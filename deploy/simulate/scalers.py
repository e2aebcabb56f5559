"""What decides how many replicas there are: production's policy, Ray Serve's, or nobody."""

from collections import deque
from math import ceil
from typing import Any

from ray.serve.autoscaling_policy import (
    _apply_delay_logic,  # pyright: ignore[reportPrivateUsage]
    _apply_scaling_factors,  # pyright: ignore[reportPrivateUsage]
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext

from ...cluster.autoscaling_config import AutoscalingConfig
from ...cluster.demand import DemandMeter
from ...cluster.scaling import Decision, Moment, ScalingState, decide
from .elastic import View


class Fixed:
    """Always as many."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def target(self, view: View) -> int:
        """See ``Scaler``."""
        return self._replicas


class PredictedWork:
    """Production's decision; ``decisions`` are those that changed something."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self.decisions: list[Decision] = []
        self._config = config
        self._meter = DemandMeter()
        self._state = ScalingState()

    def target(self, view: View) -> int:
        """See ``Scaler``."""
        for demand in view.demands():
            self._meter.hear(demand, view.now)
        config = self._config
        moment = Moment(
            ready=view.ready,
            target=view.target,
            now=view.now,
            wall=view.now,
            least=config.min_replicas,
            most=config.max_replicas or view.target,
        )
        decision, self._state = decide(config, self._meter.figures(view.now), self._state, moment)
        if decision.target != decision.before:
            self.decisions.append(decision)
        return decision.target


class OngoingRequests:
    """Ray Serve 2.60's default policy: its own functions, in the order in which its controller calls them.

    It sees the mean of ongoing requests over its look-back, without the 10 s that a report may take on its way there.
    """

    def __init__(self, config: ServeAutoscaling) -> None:
        self._config = config
        self._ongoing = deque[tuple[float, int]]()
        self._state: dict[str, Any] = {}

    def target(self, view: View) -> int:
        """See ``Scaler``."""
        config, seen = self._config, self._ongoing
        seen.append((view.now, view.ongoing))
        while view.now - seen[0][0] >= config.look_back_period_s:
            seen.popleft()
        mean = sum(count for _, count in seen) / len(seen)
        context = _context(config, view, mean)
        desired, _ = replica_queue_length_autoscaling_policy(context)
        if not view.ready:
            target = ceil(desired)
        else:
            scaled = _apply_scaling_factors(desired, view.ready, config)
            target, self._state = _apply_delay_logic(max(0, scaled), view.target, config, self._state, view.now)
        return max(config.min_replicas, min(config.max_replicas, target))


def _context(config: ServeAutoscaling, view: View, ongoing: float) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=None,  # pyright: ignore[reportArgumentType]
        deployment_name="",
        app_name=None,
        current_num_replicas=view.ready,
        target_num_replicas=view.target,
        running_replicas=[],
        total_num_requests=ongoing,
        total_queued_requests=None,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=view.now,
        config=config,
    )
