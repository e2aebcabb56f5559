"""A seed gives the same faults at the same times, and every kind of fault before any of them again."""

from collections import Counter

from .asks import AskPool
from .faults import FAULTS
from .schedule import schedule
from .watch import Look, recovered


def test_a_seed_gives_the_same_plan_and_another_seed_another():
    plans = [schedule(seed, FAULTS, seconds=600, every_s=20) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert len(plans[0]) == 30


def test_every_fault_strikes_before_any_strikes_again_and_there_is_time_to_heal():
    plan = schedule(3, FAULTS, seconds=20 * len(FAULTS) * 2, every_s=20)
    counts = Counter(planned.fault.name for planned in plan)
    assert set(counts.values()) == {2}
    assert Counter(planned.fault.name for planned in plan[: len(FAULTS)]).most_common(1)[0][1] == 1
    moments = [planned.at_s for planned in plan]
    assert moments == sorted(moments)
    assert moments[0] > 0 and moments[-1] < 20 * len(FAULTS) * 2 - 5


def test_a_seed_gives_the_same_requests_of_every_kind_each_with_one_right_answer():
    asks = AskPool(5).take(48)
    assert asks == AskPool(5).take(48)
    assert {ask.kind for ask in asks} == {
        *("greedy", "sampled", "penalties", "leaves", "logprobs", "stops", "two", "minimum")
    }
    assert all(ask.body["temperature"] == 0 or "seed" in ask.body for ask in asks)
    assert {ask.stream for ask in asks} == {True, False}
    assert {ask.tenant for ask in asks} == {0, 1}


def test_recovery_is_timed_from_the_fault_to_the_first_good_look_after_the_last_bad_one():
    looks = [Look(at, at + 0.5, amiss) for at, amiss in ((9, "x"), (11, ""), (12, "y"), (13, ""), (14, "z"), (16, ""))]
    assert recovered(looks, 10, 20) == 6.5
    assert recovered(looks, 10, 12) == 0.0
    assert recovered(looks, 10, 14) == 3.5
    assert recovered(looks, 13.5, 15) == 3.0
    assert recovered(looks[:-1], 13.5, 15) is None
