"""Replicas that come and go on the virtual clock: production's decision, Serve's own, and the days that they live."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ray.serve._private.autoscaling_state import _apply_autoscaling_config  # pyright: ignore[reportPrivateUsage]
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig as ServeAutoscaling

from warmroot.cluster.autoscaling_config import AutoscalingConfig
from warmroot.deploy.simulate import scalers
from warmroot.deploy.simulate.day import day
from warmroot.deploy.simulate.elastic import Elasticity, View
from warmroot.deploy.simulate.scaled_day import SLO, Outcomes, live
from warmroot.deploy.simulate.scalers import Fixed, OngoingRequests, PredictedWork
from warmroot.deploy.simulate.trace import Trace

CONFIG = AutoscalingConfig(min_replicas=1, max_replicas=16, ttft_slo=SLO.ttft_s, itl_slo=SLO.itl_s)


@cache
def morning() -> Trace:
    """An hour in which the traffic rises."""
    return day(16_000, 3, hours=1.0, begin=9.0)


@cache
def alone() -> Outcomes:
    """What one replica makes of it."""
    return live(morning(), Fixed(1), begin_with=1)[0]


def test_a_day_has_its_hours():
    trace = day(5000, 0)
    hours = np.bincount([int(request.arrival_s // 3600) for request in trace.requests], minlength=24)[:24]
    assert hours[9:22].mean() > 2 * hours[2:6].mean()
    assert trace.requests == day(5000, 0).requests != day(5000, 1).requests
    some = day(5000, 0, hours=2.0, begin=8.0)
    assert 0 <= some.requests[0].arrival_s < 300 and len(some.requests) > 1000


def test_replicas_follow_the_work():
    scaler = PredictedWork(CONFIG)
    outcomes, changes = live(morning(), scaler, begin_with=1)
    assert not np.isnan(outcomes.ttft_s).any()  # nobody is lost, whoever comes and goes
    assert changes[1:] == [(decision.at, decision.target) for decision in scaler.decisions]
    ours = outcomes.summary(SLO)
    assert ours["attainment"] > alone().summary(SLO)["attainment"] + 0.2
    assert 2 < ours["most_replicas"] <= 16
    assert ours["replica_hours"] < ours["most_replicas"]


def test_from_none_and_back_to_none():
    short = replace(morning(), requests=morning().requests[:200])
    late = replace(short, requests=[replace(one, arrival_s=one.arrival_s + 500.0) for one in short.requests[:1]])
    both = replace(short, requests=[*late.requests, replace(late.requests[0], arrival_s=5000.0)])
    scaler = PredictedWork(CONFIG.model_copy(update={"min_replicas": 0, "scale_to_zero_delay": 60.0}))
    outcomes, changes = live(both, scaler, begin_with=0, elasticity=Elasticity(start_s=40.0))
    assert [number for _, number in changes] == [0, 1, 0, 1]
    assert changes[1][0] == pytest.approx(late.requests[0].arrival_s, abs=1.0)
    assert 40 < outcomes.ttft_s.max() < 50
    assert not np.isnan(outcomes.ttft_s).any()


def test_a_new_replica_has_what_is_hot():
    outcomes, _ = live(morning(), _Twice(), begin_with=1)
    assert outcomes.hit_tokens > 0.98 * alone().hit_tokens


class _Twice:
    """One replica, two after a while."""

    def target(self, view: View) -> int:
        return 1 if view.now < 600 else 2


@pytest.mark.parametrize(
    ("ready", "target", "ongoing"), [(1, 1, 7), (4, 4, 3), (3, 5, 40), (0, 0, 2), (0, 1, 9), (2, 2, 0)]
)
def test_serve_s_policy_is_serve_s(ready: int, target: int, ongoing: int):
    """Without delays the controller's whole chain gives the same."""
    config = ServeAutoscaling(
        min_replicas=0, max_replicas=16, target_ongoing_requests=2, upscale_delay_s=0, downscale_delay_s=0
    )
    view = View(100.0, ready, target, ongoing, list)
    whole = _apply_autoscaling_config(replica_queue_length_autoscaling_policy)
    expected, _ = whole(scalers._context(config, view, ongoing))
    assert OngoingRequests(config).target(view) == max(0, min(16, expected))


def test_serve_s_policy_waits_for_its_delays():
    policy = OngoingRequests(ServeAutoscaling(min_replicas=1, max_replicas=8, target_ongoing_requests=2))
    targets = [policy.target(View(float(second), 1, 1, 6, list)) for second in range(32)]
    assert targets == [1] * 30 + [3] * 2 or targets == [1] * 30 + [3, 1]
