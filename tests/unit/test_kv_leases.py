"""Who lives is judged by the reader's own clock, and only while the store answers."""

import pytest
from bus_contract import replica_info
from manual_clock import ManualClock

from warmroot.kv_store.leases import Beat, LeaseWatch


@pytest.fixture
def clock():
    return ManualClock(50.0)


@pytest.fixture
def watch(clock):
    return LeaseWatch(clock)


def beats(count, name="a", epoch=1):
    return {name: Beat(replica_info(name, epoch), count, 5.0)}


def alive(infos):
    return [info.replica for info in infos]


def test_a_counter_that_moves_is_a_heart_that_beats(watch, clock):
    for count in range(1, 6):
        assert alive(watch.judge(beats(count), set())) == ["a"]
        clock.now += 4.0
    clock.now += 2.0
    assert alive(watch.judge(beats(5), set())) == []
    assert alive(watch.judge(beats(5), set())) == []
    assert alive(watch.judge(beats(6), set())) == ["a"]


def test_a_counter_that_begins_anew_has_moved(watch, clock):
    watch.judge(beats(900), set())
    clock.now += 4.0
    watch.judge(beats(1), set())
    clock.now += 4.0
    assert alive(watch.judge(beats(1), set())) == ["a"]


def test_a_new_epoch_has_a_new_lease(watch, clock):
    watch.judge(beats(3), set())
    clock.now += 6.0
    assert [info.epoch for info in watch.judge(beats(3, epoch=2), set())] == [2]


def test_time_without_the_store_does_not_count(watch, clock):
    watch.judge(beats(1), set())
    watch.lost_touch()
    clock.now += 1000.0
    watch.lost_touch()
    assert alive(watch.judge(beats(1), set())) == ["a"]
    clock.now += 4.0
    assert alive(watch.judge({}, set())) == ["a"]
    clock.now += 2.0
    assert alive(watch.judge({}, set())) == []


def test_who_left_is_gone_at_once(watch):
    watch.judge(beats(1), set())
    assert alive(watch.judge({}, {"a"})) == []


def test_a_reader_that_slept_believes_the_next_word(watch, clock):
    watch.judge(beats(1), set())
    clock.now += 3600.0
    assert alive(watch.judge(beats(2), set())) == ["a"]
