"""Autoscaling as Serve sees it: its configuration, the policy in the controller, and the desk between."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from warmroot.actors.scaling_desk import DemandTeller, ScalingDesk
from warmroot.cluster.application_args import read_models
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.demand import FORGET_S, Demand
from warmroot.cluster.errors import ConfigError
from warmroot.deploy import autoscaling
from warmroot.deploy.app import replica_deployments
from warmroot.deploy.autoscaling import ScalingPolicy
from warmroot.deploy.serve_config import serve_config

from .manual_clock import ManualClock

KEYS = {"max_replicas": 8, "min_replicas": 2, "upscale_delay": 0.0, "served_model_name": ("m",)}


def test_limits_stand_beside_the_deployment_and_serve_reads_them():
    config = serve_config(WarmrootConfig.of("x", **KEYS))
    ServeDeploySchema.model_validate(config)
    [application] = config["applications"]
    assert application["args"] == {"model": "x", "served_model_name": ["m"]}  # other limits do not build it anew
    [ingress, replica] = application["deployments"]
    assert ingress == {"name": "Ingress", "num_replicas": 1}
    read = AutoscalingConfig(**replica["autoscaling_config"])
    assert (read.min_replicas, read.max_replicas, read.initial_replicas) == (2, 8, None)
    assert (read.upscale_delay_s, read.downscale_delay_s, read.downscale_to_zero_delay_s) == (0.0, 0.0, None)
    kind = read.policy.get_policy()  # as the controller unpickles it
    assert kind.__name__ == "ScalingPolicy"
    assert kind(**read.policy.policy_kwargs)(context(ready=3, target=5))[0] == 5  # Ray is not even running here


def test_the_policy_knows_how_long_a_replica_may_take_to_start():
    [application] = serve_config(WarmrootConfig.of("x", replica_start_timeout=4000.0, **KEYS))["applications"]
    policy = AutoscalingConfig(**application["deployments"][1]["autoscaling_config"]).policy
    assert policy.get_policy()(**policy.policy_kwargs)._give_up_s == 4000.0
    assert ScalingPolicy("m", max_replicas=8)._give_up_s == 1800.0


def test_the_ingress_knows_that_there_may_be_no_replica():
    [application] = serve_config(WarmrootConfig.of("x", max_replicas=8, min_replicas=0))["applications"]
    assert application["args"] == {"model": "x", "min_replicas": 0, "max_replicas": 1}  # whatever the most
    [config] = read_models(application["args"], {})
    assert config.autoscaling.min_replicas == 0
    assert application["deployments"][1]["autoscaling_config"]["max_replicas"] == 8


def test_only_a_model_with_one_group_of_replicas_scales():
    groups = [WarmrootConfig.of("x", max_replicas=4), WarmrootConfig.of("x", tensor_parallel_size=2)]
    with pytest.raises(ConfigError, match="max_replicas: x has several groups of replicas: their sizes are fixed"):
        replica_deployments(groups)
    several = [WarmrootConfig.of("x", max_replicas=4), WarmrootConfig.of("y", max_replicas=4)]
    assert replica_deployments(several) == ["Replica-x", "Replica-y"]


def test_the_desk_gives_each_word_once_and_keeps_what_was_decided(policy: "Policy"):
    desk = policy.desk
    first, second = Demand(router="a", arrivals=1), Demand(router="a", arrivals=2)
    assert desk.tell("m", first) is None
    desk.tell("m", second)
    desk.tell("other", first)
    assert desk.ask("m", None) == [second]
    assert desk.ask("m", None) == []
    policy.tell(Demand(router="a", waiting=1, in_flight=1))
    assert policy.call(ready=0, target=0) == 1
    policy.call(ready=0, target=1)
    status = desk.tell("m", first)
    assert status is not None
    assert (status.latest.target, status.changes) == (1, {("up", "waiting"): 1})
    assert desk.tell("other", first) is None


def test_the_desk_forgets_words_that_nobody_asks_for():
    clock = ManualClock(0.0)
    desk = ScalingDesk(clock)
    for router in range(100):  # clients that come and go, of a model whose number of replicas is fixed
        desk.tell("m", Demand(router=str(router)))
        clock.now += 1.0
    assert len(desk._demands["m"]) <= FORGET_S + 1
    late = Demand(router="late")
    desk.tell("m", late)
    clock.now += FORGET_S + 0.5
    assert desk.ask("m", None) == []  # what was so long ago is not what there is now


async def test_who_leaves_the_cluster_does_not_start_another_to_tell_its_demand(monkeypatch: pytest.MonkeyPatch):
    """Outside a cluster a call of Ray's starts one."""
    assert not ray.is_initialized()
    monkeypatch.setattr(ray, "get_actor", lambda *name: pytest.fail("it was called"))
    teller = DemandTeller("m", cast(Any, None))
    assert not await teller._tell()


@pytest.mark.parametrize(("stays", "lines"), [(True, 1), (False, 0)])
async def test_a_process_that_ends_while_it_tells_its_demand_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stays: bool, lines: int
):
    connected = iter([True, stays])
    monkeypatch.setattr(ray, "is_initialized", lambda: next(connected))

    def ends(*name: str) -> None:
        raise RuntimeError("the core worker is gone")

    monkeypatch.setattr(ray, "get_actor", ends)
    assert not await DemandTeller("m", cast(Any, None))._tell()
    assert len(caplog.records) == lines


class Policy:
    """The policy, with a desk that answers at once, and a clock that goes on by a second with each call."""

    def __init__(self, desk: Any) -> None:
        self.desk, self.now = desk, 1000.0
        self.policy = ScalingPolicy("m", max_replicas=8, min_replicas=0, upscale_delay=0.0)
        answering = SimpleNamespace(ask_demand=SimpleNamespace(remote=self._ask))
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(ray, "get_actor", lambda *name: answering)
        self._patch.setattr(autoscaling.time, "monotonic", lambda: self.now)

    def tell(self, demand: Demand) -> None:
        self.desk.tell("m", demand)

    def call(self, **numbers: int) -> int:
        """It asks at one call and hears at the next."""
        self.now += 1.0
        self.policy(context(**numbers))
        return self.policy(context(**numbers))[0]

    def close(self) -> None:
        self._patch.undo()

    def _ask(self, *arguments: Any) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(self.desk.ask(*arguments))
        except Exception as error:
            future.set_exception(error)
        return SimpleNamespace(future=lambda: future)


@pytest.fixture
def policy():
    made = Policy(ScalingDesk())
    yield made
    made.close()


@pytest.fixture
def serve_log(caplog: pytest.LogCaptureFixture):
    """What goes to the controller's log, which is not passed on to others."""
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "ray.serve")
    yield caplog
    logger.removeHandler(caplog.handler)


def context(ready: int = 1, target: int = 1, least: int = 0, most: int = 8) -> Any:
    return SimpleNamespace(
        current_num_replicas=ready,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


def test_what_routers_tell_becomes_a_number(policy: Policy, serve_log: pytest.LogCaptureFixture):
    policy.tell(Demand(router="a", waiting=3, waiting_s=1.0, in_flight=3))
    assert policy.call(ready=0, target=0) == 1
    assert "autoscaling m from 0 to 1 replicas: 3 requests wait for the first replica" in serve_log.text
    assert policy.policy(context(ready=0, target=1))[0] == 1  # between two words it stays


def test_a_desk_that_fails_changes_nothing_and_is_looked_up_again(policy: Policy):
    class Broken:
        def ask(self, *arguments: Any) -> Any:
            raise ConnectionError("the actor died")

    desk, policy.desk = policy.desk, Broken()
    assert [policy.call(ready=3, target=3) for _ in range(20)] == [3] * 20
    policy.desk = desk
    policy.tell(Demand(router="a", waiting=1, in_flight=1))
    assert policy.call(ready=0, target=0) == 1


def test_a_desk_that_never_answers_is_asked_again(policy: Policy):
    silent = SimpleNamespace(remote=lambda *arguments: SimpleNamespace(future=Future))
    lookups: list[str] = []
    policy._patch.setattr(ray, "get_actor", lambda *name: lookups.append(name[0]) or SimpleNamespace(ask_demand=silent))
    assert [policy.call(ready=2, target=2) for _ in range(30)] == [2] * 30
    assert len(lookups) == 5


def test_an_answer_that_makes_no_sense_does_not_reach_the_controller(
    policy: Policy, serve_log: pytest.LogCaptureFixture
):
    policy.desk.tell("m", SimpleNamespace(router="a"))
    assert policy.call(ready=2, target=4) == 4
    assert "autoscaling of m failed; it stays as it is" in serve_log.text
