import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock

from warmroot.kv_store.hashing import namespace_root, pack_tokens
from warmroot.router.policy.base import Prefix
from warmroot.router.policy.in_flight import InFlight
from warmroot.router.policy.prefix_counts import PrefixCounts

ROOT = namespace_root("m")


def prefix(tokens, root=ROOT):
    return Prefix(root, 2, pack_tokens(tokens))


def test_a_prefix_counts_from_reservation_until_its_events_are_in():
    clock = ManualClock()
    flight = InFlight(clock, linger_s=1.0)
    reservation = flight.reserve("a", prefix([1, 2, 3, 4, 5]), 5, 5, 1.0)
    assert flight.match(prefix([1, 2, 3, 4, 9])) == {"a": 4}
    assert flight.match(prefix([1, 2, 9, 9])) == {"a": 2}
    assert flight.match(prefix([1, 2, 3, 4], namespace_root("m", salt="x"))) == {}
    clock.now = 0.5
    flight.first_token(reservation)
    flight.release(reservation)
    clock.now = 1.4
    assert flight.match(prefix([1, 2, 3, 4])) == {"a": 4}
    clock.now = 1.6
    assert flight.match(prefix([1, 2, 3, 4])) == {}


def test_a_refused_prefix_counts_no_longer_at_once():
    flight = InFlight(ManualClock())
    first, second = (flight.reserve("a", prefix([1, 2, 3, 4]), 4, 4, 1.0) for _ in range(2))
    flight.release(first)
    assert flight.match(prefix([1, 2, 3, 4])) == {"a": 4}
    flight.release(second)
    assert flight.match(prefix([1, 2, 3, 4])) == {}


def test_backlog_is_the_sum_of_estimates_less_the_time_the_head_has_had():
    clock = ManualClock()
    flight = InFlight(clock)
    first = flight.reserve("a", prefix([1]), 1, 1, 2.0)
    flight.reserve("a", prefix([2]), 1, 1, 1.0)
    assert flight.backlog_s("a") == 3.0
    clock.now = 0.5
    assert flight.backlog_s("a") == 2.5
    clock.now = 9.0
    assert flight.backlog_s("a") == 1.0
    flight.first_token(first)
    assert flight.backlog_s("a") == 1.0
    clock.now = 9.25
    assert flight.backlog_s("a") == 0.75
    assert (flight.unfinished("a"), flight.unfinished("b"), flight.backlog_s("b")) == (2, 0, 0.0)


@given(st.lists(st.sampled_from(["first_token", "release"]), max_size=8))
def test_ends_are_idempotent_in_any_order(calls):
    clock = ManualClock()
    flight = InFlight(clock)
    reservation, other = (flight.reserve("a", prefix([1, 2]), 2, 2, 1.0) for _ in range(2))
    for call in calls:
        getattr(flight, call)(reservation)
    flight.release(reservation)
    assert (flight.unfinished("a"), flight.backlog_s("a")) == (1, 1.0)
    flight.release(other)
    clock.now = 100.0
    assert flight.match(prefix([1, 2])) == {}
    assert (flight.unfinished("a"), flight.backlog_s("a"), len(flight._prefixes)) == (0, 0.0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from("abc")), max_size=20), st.randoms())
def test_prefix_counts_agree_with_a_naive_model(prompts, rng):
    counts, held = PrefixCounts(), Counter()
    rng = random.Random(rng.random())
    for tokens, replica in prompts:
        counts.add(ROOT, 2, pack_tokens(tokens), replica)
        held[tuple(tokens), replica] += 1
        if rng.random() < 0.4:
            gone = rng.choice(sorted(held.elements()))
            counts.remove(ROOT, 2, pack_tokens(gone[0]), gone[1])
            held -= Counter([gone])
    for question in [[0, 0, 0, 0], [0, 1, 1, 0, 1, 1], [1]]:
        expected = {}
        for tokens, replica in held:
            common = next((n for n, pair in enumerate(zip(tokens, question, strict=False)) if pair[0] != pair[1]), None)
            common = min(len(tokens), len(question)) if common is None else common
            if common // 2:
                expected[replica] = max(expected.get(replica, 0), common // 2 * 2)
        assert counts.match(ROOT, 2, pack_tokens(question)) == expected
    for tokens, replica in held.elements():
        counts.remove(ROOT, 2, pack_tokens(tokens), replica)
    assert len(counts) == 0


def test_a_replica_that_left_keeps_its_place_until_nothing_counts_for_it():
    clock = ManualClock()
    flight = InFlight(clock, linger_s=1.0)
    first = flight.reserve("a", prefix([1, 2]), 2, 2, 1.0)
    flight.left("a")
    flight.left("nobody")
    flight.reserve("b", prefix([1, 2]), 2, 2, 1.0)
    assert flight.match(prefix([1, 2])) == {"a": 2, "b": 2}
    flight.first_token(first)
    flight.release(first)
    clock.now = 2.0
    assert flight.match(prefix([1, 2])) == {"b": 2}
    flight.reserve("c", prefix([1, 2]), 2, 2, 1.0)
    assert flight.slots.names == ["c", "b"]


def test_a_replica_that_comes_back_in_time_stays():
    flight = InFlight(ManualClock())
    first = flight.reserve("a", prefix([1, 2]), 2, 2, 1.0)
    flight.left("a")
    again = flight.reserve("a", prefix([1, 2]), 2, 2, 1.0)
    for reservation in (first, again):
        flight.release(reservation)
    assert flight.slots.names == ["a"]
    flight.left("a")
    assert flight.slots.names == [None]
