"""What routers tell of their work, put together; and what a routing core has to tell."""

from random import Random

import pytest

from warmroot.cluster.demand import Demand, DemandMeter, Figures, ReplicaUse
from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import Load, ReplicaInfo
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.core import RoutingCore
from warmroot.router.demand import demand_of
from warmroot.router.late_binding import LateBinding
from warmroot.router.policy import RoutingRequest, make_policy
from warmroot.router.policy.rates import Kind, ReplicaRates

from .manual_clock import ManualClock


def told(router: str, arrivals: int, arrived_s: float, **more: object) -> Demand:
    return Demand(router=router, arrivals=arrivals, arrived_s=arrived_s, **more)


def test_rates_are_of_the_latest_seconds_and_of_all_routers():
    meter = DemandMeter()
    for second in range(200):
        meter.hear(told("a", 2 * second, 1.0 * second, decoded=10 * second, decoded_s=0.5 * second), second)
        meter.hear(told("b", second, 0.5 * second), second)
        figures = meter.figures(second)
    assert figures is not None
    assert figures.arriving == pytest.approx(1.5)
    assert figures.prefill_s == pytest.approx(0.5)
    assert figures.itl_s == pytest.approx(0.05)


def test_a_single_long_prompt_is_no_rate():
    meter = DemandMeter()
    for second in range(160):
        meter.hear(told("a", int(second > 150), 30.0 * (second > 150)), second)
        figures = meter.figures(second)
    assert figures is not None
    assert figures.arriving == pytest.approx(30 / 150, rel=0.05)  # not 30 / 30


def test_what_has_ended_does_not_count_any_more():
    meter = DemandMeter()
    for second in range(200):
        meter.hear(told("a", min(second, 150), 0.5 * min(second, 150)), second)
        figures = meter.figures(second)
    assert figures is not None
    assert figures.arriving == 0.0


def test_a_router_that_starts_again_does_not_count_backwards_and_one_that_is_gone_is_forgotten():
    meter = DemandMeter()
    for second in range(60):
        meter.hear(told("a", 5 * second, 5.0 * second, in_flight=3), second)
        meter.figures(second)
    meter.hear(told("a", 0, 0.0, in_flight=1), 60)
    meter.hear(told("b", 1000, 1e6, in_flight=2), 60)  # it is new here, not its work
    figures = meter.figures(60)
    assert figures is not None
    assert (figures.in_flight, figures.arriving) == (3, pytest.approx(5.0, rel=0.05))
    assert meter.figures(65.0) is not None
    assert meter.figures(65.1) is None


def test_a_router_that_falls_silent_may_still_have_what_it_had():
    meter = DemandMeter()
    for second in range(60):
        meter.hear(Demand(router="idle", idle_s=600.0 + second), second)
        if second < 20:
            meter.hear(Demand(router="busy", in_flight=1), second)
    figures = meter.figures(59)
    assert figures is not None
    assert (figures.in_flight, figures.idle_s) == (0, 40.0)


def test_who_begins_to_listen_knows_of_no_time_without_requests():
    meter = DemandMeter()
    meter.hear(Demand(router="a", idle_s=600.0), 1000.0)
    figures = meter.figures(1000.0)
    assert figures is not None
    assert figures.idle_s == 0.0


def test_what_each_replica_holds_counts_once():
    meter = DemandMeter()
    one, newer = ReplicaUse(slots=0.2, kv=0.5), ReplicaUse(slots=0.3, kv=0.4)
    meter.hear(Demand(router="a", replicas=(("r0", one), ("r1", one))), 1.0)
    meter.hear(Demand(router="b", replicas=(("r0", newer),), idle_s=7.0), 1.0)
    figures = meter.figures(1.0)
    assert figures is not None
    assert (figures.slots, figures.kv) == (pytest.approx(0.5), pytest.approx(1.0))
    assert figures.idle_s == 0.0


def test_only_prompts_that_need_not_take_longer_can_be_late():
    figures = Figures(ttfts=((3.0, 0.5), (1.0, 0.5), (9.0, 4.0)))
    assert figures.late(2.0) == 0.5
    assert Figures().late(2.0) == 0.0


class Member:
    def __init__(self, name: str, load: Load | None = None) -> None:
        self.info = ReplicaInfo(
            replica=ReplicaId(name),
            epoch=Epoch(1),
            model="m",
            address="",
            kv_namespace=BlockHash(bytes(16)),
            block_size=16,
            kv_total_blocks=100,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=1000,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.02,
        )
        self.load = load or Load(running=1, kv_used_blocks=30, kv_total_blocks=100, max_num_seqs=4)
        self.rates = ReplicaRates(Kind(1000.0, 0.02))


def test_a_router_tells_what_came_what_waits_and_how_late_first_tokens_are():
    clock = ManualClock(100.0)
    late = LateBinding(backlog_s=0.4)
    core = RoutingCore(PrefixIndex(), make_policy("warm_prefix", Random(0)), clock, late=late)
    core.join(Member("r0"))
    tickets = [core.submit(RoutingRequest(RequestId(str(number)), 500), lambda ticket: None) for number in range(3)]
    demand = demand_of(core, "router", held=2, held_tokens=300)
    assert (demand.arrivals, demand.arrived_s) == (3, pytest.approx(1.5))
    # The first one is being computed; two wait here, and two for a first replica.
    assert (demand.waiting, demand.waiting_s) == (4, pytest.approx(1.3))
    assert (demand.in_flight, demand.idle_s) == (5, 0.0)
    assert demand.step_s == pytest.approx(0.02)
    assert demand.replicas == (("r0", ReplicaUse(slots=0.25, kv=0.3)),)
    clock.now = 100.7
    core.first_token(tickets[0], 0)
    assert demand_of(core, "router").ttfts == ((pytest.approx(0.7), pytest.approx(0.5)),)
    clock.now = 102.7
    core.finish(tickets[0], 20)
    for ticket in tickets[1:]:
        core.finish(ticket)
    clock.now = 112.7
    demand = demand_of(core, "router")
    assert (demand.decoded, demand.decoded_s) == (20, pytest.approx(2.0))
    assert (demand.in_flight, demand.waiting) == (0, 0)


def test_the_time_without_requests_counts_from_the_last_one():
    clock = ManualClock(100.0)
    core = RoutingCore(PrefixIndex(), make_policy("warm_prefix", Random(0)), clock)
    core.join(Member("r0", Load()))
    ticket = core.submit(RoutingRequest(RequestId("a"), 500), lambda ticket: None)
    clock.now = 130.0
    assert demand_of(core, "router").idle_s == 0.0
    core.finish(ticket)
    clock.now = 140.0
    assert demand_of(core, "router").idle_s == 10.0
    core.leave(ReplicaId("r0"))
    assert demand_of(core, "router", held=1, held_tokens=2000).waiting_s == pytest.approx(2.0)


@pytest.mark.parametrize("load", [Load(running=1), Load(waiting=1)])
def test_what_others_have_a_replica_do_is_a_request_too(load: Load):
    """Plain Serve handles do not tell of theirs."""
    clock = ManualClock(100.0)
    core = RoutingCore(PrefixIndex(), make_policy("warm_prefix", Random(0)), clock)
    member = Member("r0", load)
    core.join(member)
    clock.now = 130.0
    assert demand_of(core, "router").idle_s == 0.0
    member.load = Load()
    clock.now = 140.0
    assert demand_of(core, "router").idle_s == 10.0
