"""Counts and latencies of the last minute, and what routers tell each other of them."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import ManualClock

from warmroot.cluster.errors import EngineError, InvalidRequestError, OverloadedError
from warmroot.cluster.ids import ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, TokenDelta
from warmroot.router.peers import Peers
from warmroot.router.recent import WINDOW_S, Figures, RecentFigures, quantile


def delta(num_tokens=1, cached=None, reason=None):
    return TokenDelta(
        request_id=RequestId("x"), index=0, token_ids=[0] * num_tokens, cached_tokens=cached, finish_reason=reason
    )


@pytest.fixture
def clock():
    return ManualClock(1000.0)


def serve(recent, clock, ttft=0.2, itl=0.05, deltas=3, prompt=100, cached=60):
    with recent.watch() as watch:
        clock.now += ttft
        watch.saw(delta(cached=cached), prompt)
        for _ in range(deltas - 1):
            clock.now += itl
            watch.saw(delta(2), prompt)


def test_a_request_is_counted_once_and_timed(clock):
    recent = RecentFigures(clock)
    serve(recent, clock)
    figures = recent.figures()
    assert (figures.started, figures.failed) == (1, 0)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (100, 60, 5)
    assert quantile(figures.ttft, 0.5) == pytest.approx(0.2, rel=0.06)
    assert quantile(figures.itl, 0.95) == pytest.approx(0.05, rel=0.06)
    assert sum(figures.itl.values()) == 2


def test_what_is_older_than_a_minute_is_forgotten(clock):
    recent = RecentFigures(clock)
    serve(recent, clock)
    clock.now += WINDOW_S / 2
    serve(recent, clock, ttft=1.0)
    assert recent.figures().started == 2
    clock.now += WINDOW_S / 2 + 1
    figures = recent.figures()
    assert figures.started == 1
    assert quantile(figures.ttft, 0.01) == pytest.approx(1.0, rel=0.06)
    assert WINDOW_S - 5 <= figures.span_s <= WINDOW_S
    clock.now += WINDOW_S
    assert recent.figures().started == 0


def test_the_span_is_that_of_what_was_seen(clock):
    recent = RecentFigures(clock)
    assert recent.figures().span_s == 1.0
    clock.now += 7
    assert recent.figures().span_s == 7.0


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (OverloadedError("full", retry_after=1.0), 1),
        (EngineError("x"), 1),
        (InvalidRequestError("x"), 0),
        (KeyError(), 0),
    ],
)
def test_what_the_cluster_could_not_serve_has_failed(clock, error, failed):
    recent = RecentFigures(clock)
    with pytest.raises(type(error)), recent.watch():
        raise error
    assert recent.figures().failed == failed


@pytest.mark.parametrize(
    ("reason", "failed"), [(FinishReason.ERROR, 1), (FinishReason.DEADLINE, 1), (FinishReason.ABORT, 0)]
)
def test_an_end_that_is_a_failure(clock, reason, failed):
    recent = RecentFigures(clock)
    with recent.watch() as watch:
        watch.saw(delta(cached=0), 10)
        watch.saw(delta(0, reason=reason), 10)
    assert recent.figures().failed == failed


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_a_quantile_is_right_to_a_twentieth(latencies, share):
    clock = ManualClock(0.0)
    recent = RecentFigures(clock)
    for latency in latencies:
        clock.now = 2000.0 - latency
        watch = recent.watch()
        clock.now = 2000.0
        watch.saw(delta(cached=0), 1)
    place = max(0, -(-int(share * len(latencies) * 1e9) // 10**9) - 1)
    near = {sorted(latencies)[min(place + shift, len(latencies) - 1)] for shift in (0, 1)}
    found = quantile(recent.figures().ttft, share)
    assert any(found == pytest.approx(value, rel=0.051) for value in near)


def test_hit_rates_of_replicas(clock):
    recent = RecentFigures(clock)
    for replica, cached in (("a", 100), ("a", 0), ("b", 25)):
        with recent.watch() as watch:
            watch.saw(replace(delta(cached=cached), replica=ReplicaId(replica)), 100)
    assert recent.hit_rates() == {"a": 0.5, "b": 0.25}
    clock.now += WINDOW_S + 5
    assert recent.hit_rates() == {}


def test_no_latencies_have_no_quantile():
    assert quantile({}, 0.5) is None


def test_routers_tell_each_other(clock):
    one, two = Peers("one", clock), Peers("two", clock)
    recent = RecentFigures(clock)
    one.figures = recent.figures
    serve(recent, clock)
    two.hear(one.word(everything=True))
    (peer,) = two.others()
    assert (peer.name, peer.in_flight, peer.silent_s, peer.figures) == ("one", 0, 0.0, recent.figures())
    clock.now += 1
    two.hear(one.word())  # a short word leaves them as they are
    assert two.others()[0].figures.started == 1
    both = peer.figures + recent.figures()
    assert (both.started, both.output_tokens, sum(both.itl.values())) == (2, 10, 4)


@pytest.mark.parametrize(
    "wire",
    [
        [1.0, [1, 2, 3], {}, {}],
        [1.0, [1, 2, 3, 4, -5], {}, {}],
        [0.0, [0] * 5, {}, {}],
        [1e9, [0] * 5, {}, {}],
        [1.0, [0] * 5, {999: 1}, {}],
        [1.0, [0] * 5, {"a": 1}, {}],
        [1.0, [0] * 5, {1: -1}, {}],
        [1.0, [0] * 5, [1], {}],
        "figures",
        None,
    ],
)
def test_a_word_with_figures_that_are_none(clock, wire):
    word = msgpack.unpackb(Peers("one", clock).word(everything=True))
    word[5] = wire
    with pytest.raises(ValueError, match="not a word of a router"):
        Peers("two", clock).hear(msgpack.packb(word))


def test_figures_survive_the_wire(clock):
    recent = RecentFigures(clock)
    serve(recent, clock)
    figures = recent.figures()
    assert Figures.from_wire(msgpack.unpackb(msgpack.packb(figures.to_wire()), strict_map_key=False)) == figures
