"""How many replicas there shall be: signals, delays, bounds, and what holds whatever comes."""

from collections import deque
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.autoscaling_config import AutoscalingConfig
from warmroot.cluster.demand import Figures
from warmroot.cluster.needs import MOST_BUSY, replicas_for
from warmroot.cluster.scaling import START_S, Decision, Moment, ScalingState, decide
from warmroot.cluster.scaling_status import LOG_LENGTH, first_status

CONFIG = AutoscalingConfig(
    min_replicas=0,
    max_replicas=16,
    upscale_delay=5.0,
    downscale_delay=60.0,
    scale_to_zero_delay=300.0,
    itl_slo=0.05,
    target_queue_wait=1.0,
)
BUSY = Figures(arriving=2.0, prefill_s=0.2, in_flight=4)
QUIET = Figures(arriving=0.2, prefill_s=0.2, in_flight=1)
IDLE = Figures(idle_s=1e4)


class Fleet:
    """Replicas that are ready ``start_s`` after they were asked for; a second passes with each decision."""

    def __init__(
        self, ready: int, config: AutoscalingConfig = CONFIG, start_s: float = 10.0, give_up_s: float = inf
    ) -> None:
        self.config, self.state, self.start_s = config, ScalingState(), start_s
        self.now, self.give_up_s = 1000.0, give_up_s
        self.target = self.ready = ready
        self.coming: list[float] = []
        self.log: list[Decision] = []

    def second(self, figures: Figures | None) -> Decision:
        self.now += 1.0
        while self.coming and self.coming[0] <= self.now:
            self.coming.pop(0)
            self.ready += 1
        moment = Moment(
            ready=self.ready,
            target=self.target,
            now=self.now,
            least=self.config.min_replicas,
            most=self.config.max_replicas or 1,
            give_up_s=self.give_up_s,
        )
        decision, self.state = decide(self.config, figures, self.state, moment)
        more = decision.target - self.target
        self.coming += [self.now + self.start_s] * max(0, more)
        for _ in range(-more):
            if self.coming:
                self.coming.pop()
            else:
                self.ready -= 1
        self.target = decision.target
        if more:
            self.log.append(decision)
        return decision

    def seconds(self, count: int, figures: Figures | None) -> "list[int]":
        return [self.second(figures).target for _ in range(count)]


def test_work_that_arrives_brings_replicas_after_the_delay_and_no_more_than_serve_at_once():
    fleet = Fleet(1)
    targets = fleet.seconds(6, BUSY)
    assert targets[:5] == [1] * 5  # the need was seen first at the first of these
    assert targets[5] == 2  # 2.0 / 0.7 are needed, one may start beside the one that serves
    fleet.seconds(30, BUSY)
    assert fleet.target == 3
    assert fleet.log[0].signal == "arriving"
    assert fleet.log[0].reasons == (
        "prefill that keeps 2.00 replicas busy arrives",
        "3 are needed, 1 may start at once",
    )


def test_a_need_that_does_not_last_brings_none():
    fleet = Fleet(1)
    for _ in range(10):
        fleet.seconds(4, BUSY)
        fleet.seconds(1, QUIET)
    assert fleet.log == []


def test_what_falls_takes_replicas_one_by_one_after_the_delay():
    fleet = Fleet(4)
    assert fleet.seconds(60, QUIET) == [4] * 60
    fleet.seconds(1, QUIET)
    assert fleet.target == 3
    assert fleet.log[0].reasons[1] == "1 would have done for 60 s"
    fleet.seconds(15, QUIET)
    assert fleet.target == 2
    fleet.seconds(120, QUIET)
    assert fleet.target == 1  # somebody is there: never none


def test_what_was_needed_meanwhile_stays():
    fleet = Fleet(6)
    fleet.seconds(30, BUSY)
    fleet.seconds(31, QUIET)
    fleet.seconds(90, QUIET)
    assert fleet.target >= 3  # BUSY was needed within the minute that ended
    fleet.seconds(300, QUIET)
    assert fleet.target == 1


def test_the_last_one_goes_only_when_nobody_asked_for_the_whole_delay():
    fleet = Fleet(1)
    assert fleet.seconds(350, replace(IDLE, idle_s=299.0)) == [1] * 350
    assert fleet.second(replace(IDLE, idle_s=300.0)).target == 0
    assert fleet.log[0].reasons == ("no request for 300 s",)
    busy = Fleet(1)
    assert busy.seconds(400, replace(IDLE, in_flight=1)) == [1] * 400
    kept = Fleet(1, CONFIG.model_copy(update={"min_replicas": 1}))
    assert kept.seconds(400, IDLE) == [1] * 400


def test_what_was_served_lately_does_not_bring_the_last_one_back():
    fleet = Fleet(1, CONFIG.model_copy(update={"scale_to_zero_delay": 12.0, "upscale_delay": 1.0}))
    lately = Figures(arriving=0.05, prefill_s=0.2, idle_s=12.0)
    assert fleet.seconds(60, lately) == [1] * 12 + [0] * 48


def test_a_replica_that_has_just_come_is_not_idle_yet():
    """Serve itself starts one for a plain handle's call, which no router tells of before it is there."""
    fleet = Fleet(0)
    fleet.seconds(10, IDLE)
    fleet.target = fleet.ready = 1
    assert fleet.seconds(301, IDLE) == [1] * 300 + [0]


def test_the_first_one_is_started_at_once():
    fleet = Fleet(0)
    assert fleet.seconds(5, IDLE) == [0] * 5
    decision = fleet.second(Figures(waiting=1, waiting_s=0.1, in_flight=1))
    assert (decision.target, decision.signal) == (1, "waiting")
    assert decision.reasons == ("1 requests wait for the first replica",)
    waiting = Figures(waiting=50, waiting_s=60.0, in_flight=50)
    assert fleet.seconds(9, waiting)[-1] == 1  # others follow once one serves


def test_a_first_replica_that_never_comes_is_asked_for_anew():
    fleet, waiting = Fleet(0, start_s=1e9, give_up_s=100.0), Figures(waiting=1, waiting_s=0.1, in_flight=1)
    targets = fleet.seconds(206, waiting)
    assert targets == [1] * 101 + [0] + [1] * 101 + [0] + [1] * 2
    assert fleet.log[1].reasons == ("no replica has come up for 101 s", "it is begun anew")
    kept = Fleet(1, CONFIG.model_copy(update={"min_replicas": 1}), give_up_s=100.0)
    kept.ready = 0
    assert set(kept.seconds(300, waiting)) == {1}


def test_while_replicas_start_no_more_are_asked_for_than_serve():
    fleet = Fleet(2, start_s=600.0)
    flood = Figures(arriving=10.0, prefill_s=1.0, waiting=100, waiting_s=100.0, in_flight=100)
    assert max(fleet.seconds(500, flood)) == 4


def test_a_queue_that_is_gone_before_a_replica_is_up_brings_none():
    fleet = Fleet(2)
    short = Figures(arriving=0.5, prefill_s=0.5, waiting=20, waiting_s=10.0, in_flight=20)
    assert fleet.seconds(60, short)[-1] == 2  # two replicas do that in 7 of START_S seconds
    assert START_S > 10.0 / 1.5
    fleet.seconds(20, replace(short, waiting=400, waiting_s=200.0))
    assert fleet.log[0].signal == "waiting"
    assert "155.0 s of which a new replica would still find" in fleet.log[0].reasons[0]


@pytest.mark.parametrize(
    ("figures", "signal", "target"),
    [
        (Figures(kv=3.3, in_flight=9), "kv", 5),
        (Figures(slots=3.7, in_flight=9), "slots", 5),
        (Figures(itl_s=0.07, step_s=0.03, in_flight=9), "itl", 8),
        (Figures(ttfts=((3.0, 0.1),) * 5 + ((0.5, 0.1),) * 5, in_flight=9), "ttft", 6),
    ],
)
def test_other_signals(figures: Figures, signal: str, target: int):
    fleet = Fleet(4)
    fleet.seconds(6, figures)
    assert (fleet.log[0].signal, fleet.log[0].target) == (signal, target)


def test_slos_that_no_number_of_replicas_would_meet_bring_none():
    fleet = Fleet(2)
    alone = Figures(itl_s=0.09, step_s=0.06, in_flight=9, ttfts=((9.0, 5.0),) * 50)
    assert set(fleet.seconds(60, alone)) == {2}


def test_times_that_fewer_replicas_took_do_not_ask_for_more_than_they_did():
    """Tokens' times are means of half a minute, in which there were fewer replicas than there are now."""
    fleet, times = Fleet(4), deque[float](maxlen=30)
    for _ in range(120):
        times.append(0.03 + 0.16 / fleet.ready)  # eight of them have tokens 50 ms apart
        fleet.second(Figures(itl_s=sum(times) / len(times), step_s=0.03, in_flight=9))
    assert [decision.target for decision in fleet.log] == [8]
    fleet, late = Fleet(4), Figures(ttfts=((3.0, 0.1),) * 5 + ((0.5, 0.1),) * 5, in_flight=9)
    fleet.seconds(6 + 10 + 29, late)
    assert [decision.target for decision in fleet.log] == [6]


def test_without_word_of_any_router_all_stays_but_for_the_bounds():
    fleet = Fleet(3)
    assert set(fleet.seconds(300, None)) == {3}
    assert fleet.second(None).reasons == ("no router tells of its work",)
    smaller = Fleet(3, CONFIG.model_copy(update={"max_replicas": 2}))
    assert smaller.second(None).target == 2


def test_a_silence_begins_the_delays_anew():
    fleet = Fleet(4)
    fleet.seconds(55, QUIET)
    fleet.second(None)
    assert set(fleet.seconds(60, QUIET)) == {4}


def test_what_takes_long_to_start_is_kept_for_longer():
    fleet = Fleet(1, start_s=100.0)
    fleet.seconds(150, BUSY)
    assert (fleet.ready, fleet.state.start_s > 60) == (2, True)
    fleet.seconds(100, BUSY)
    lull = fleet.seconds(int(2 * fleet.state.start_s) - 1, QUIET)
    assert set(lull) == {fleet.ready}


def test_a_start_that_is_called_off_tells_nothing_of_how_long_one_takes():
    fleet = Fleet(1, start_s=1e4)  # there is no node for it
    fleet.seconds(30, BUSY)
    assert (fleet.ready, fleet.target) == (1, 2)
    fleet.seconds(300, QUIET)
    assert (fleet.ready, fleet.target, fleet.state.raises) == (1, 1, ())
    assert fleet.state.seen_start_s is None
    fleet.start_s = 10.0
    fleet.seconds(18, BUSY)
    assert (fleet.ready, fleet.state.seen_start_s) == (2, 10.0)


def test_the_bound_is_told():
    fleet = Fleet(16)
    decision = fleet.second(replace(BUSY, arriving=40.0))
    fleet.seconds(10, replace(BUSY, arriving=40.0))
    decision = fleet.second(replace(BUSY, arriving=40.0))
    assert decision.target == 16
    assert decision.reasons[-1] == "16 is the most allowed"


def test_replicas_for_is_the_wait_of_a_queue_with_many_servers():
    assert replicas_for(1.0, 0.01, 1.0) == pytest.approx(1 / MOST_BUSY)  # short prompts wait for nobody
    assert replicas_for(1.0, 5.0, 1.0) > 2.0  # long ones do
    assert replicas_for(50.0, 5.0, 1.0) == pytest.approx(50 / MOST_BUSY)  # but seldom before many replicas


figures = st.builds(
    Figures,
    arriving=st.floats(0, 20),
    prefill_s=st.floats(0.001, 10),
    waiting=st.integers(0, 200),
    waiting_s=st.floats(0, 500),
    in_flight=st.integers(0, 300),
    idle_s=st.floats(0, 1000),
    slots=st.floats(0, 20),
    kv=st.floats(0, 20),
    itl_s=st.floats(0, 0.2),
    step_s=st.floats(0, 0.1),
    ttfts=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=12).map(tuple),
)
states = st.builds(
    ScalingState,
    up_since=st.none() | st.floats(900, 1000),
    up_least=st.floats(0, 20),
    down_since=st.none() | st.floats(800, 1000),
    down_most=st.floats(0, 20),
    seen_start_s=st.none() | st.floats(1, 600),
)


@settings(deadline=None)
@given(figures, states, st.integers(0, 16), st.integers(0, 16), st.integers(0, 8), st.integers(0, 8))
def test_bounds_and_steps_hold(figures: Figures, state: ScalingState, ready: int, target: int, least: int, more: int):
    moment = Moment(ready=ready, target=target, now=1000.0, least=least, most=least + more)
    decision, _ = decide(CONFIG, figures, state, moment)
    assert least <= decision.target <= least + more
    assert decision.reasons
    if least <= target <= least + more:
        assert decision.target >= target - CONFIG.max_downscale_step
        assert decision.target <= max(target, ready + max(1, ready))
        if decision.target == 0 and target:
            assert not figures.in_flight and figures.idle_s >= CONFIG.scale_to_zero_delay


@settings(deadline=None)
@given(figures, states, st.integers(1, 16), st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 100))
def test_more_load_never_means_fewer_replicas(
    figures: Figures, state: ScalingState, target: int, arriving: float, kv: float, slots: float, waiting_s: float
):
    moment = Moment(ready=target, target=target, now=1000.0, most=16)
    figures = replace(figures, waiting=max(1, figures.waiting), in_flight=max(1, figures.in_flight))
    heavier = replace(
        figures,
        arriving=figures.arriving + arriving,
        kv=figures.kv + kv,
        slots=figures.slots + slots,
        waiting_s=figures.waiting_s + waiting_s,
        waiting=figures.waiting + int(waiting_s),
    )
    assert decide(CONFIG, heavier, state, moment)[0].target >= decide(CONFIG, figures, state, moment)[0].target


@settings(deadline=None)
@given(st.floats(0.05, 9), st.floats(0.01, 3), st.floats(0, 9), st.floats(0, 9), st.integers(1, 16), st.floats(1, 120))
def test_constant_load_is_answered_by_a_constant_number(
    arriving: float, prefill_s: float, kv: float, slots: float, replicas: int, start_s: float
):
    fleet = Fleet(replicas, start_s=start_s)
    load = Figures(arriving=arriving, prefill_s=prefill_s, kv=kv, slots=slots, in_flight=5)
    fleet.seconds(3000, load)
    directions = {decision.target > decision.before for decision in fleet.log}
    assert len(directions) <= 1  # it goes up or down, and stays
    assert len(set(fleet.seconds(600, load))) == 1


def test_the_log_keeps_changes_and_is_bounded():
    fleet = Fleet(1)
    status = first_status("m", fleet.second(QUIET))
    for _ in range(200):
        for _ in range(8):
            status = status.then(fleet.second(BUSY))
        for _ in range(80):
            status = status.then(fleet.second(QUIET))
    assert len(status.log) == LOG_LENGTH
    ups = sum(count for (direction, _), count in status.changes.items() if direction == "up")
    assert ups == sum(decision.target > decision.before for decision in fleet.log)
    assert status.latest.at == status.log[-1].at or status.latest.target == status.latest.before
