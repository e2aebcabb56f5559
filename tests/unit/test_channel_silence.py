"""When a peer that says nothing is gone."""

from manual_clock import ManualClock

from warmroot.router.silence import LEAST_S, MOST_S, PING_S, Silence


def ask(silence, clock, answer_s):
    silence.asked()
    clock.now += answer_s
    silence.heard()


def ticks_until_gone(silence):
    return next(n for n in range(1, 1000) if silence.too_long(PING_S))


def test_a_quick_peer_is_given_up_soon():
    clock = ManualClock()
    silence = Silence(clock)
    ask(silence, clock, 0.001)
    assert ticks_until_gone(silence) == int(LEAST_S / PING_S) + 1


def test_a_busy_peer_is_given_time_until_it_is_quick_again():
    clock = ManualClock()
    silence = Silence(clock)
    ask(silence, clock, 1.5)
    assert silence.limit_s == 6.0
    for _ in range(60):
        ask(silence, clock, 0.001)
    assert silence.limit_s == LEAST_S
    ask(silence, clock, 60.0)
    assert silence.limit_s == MOST_S


def test_any_word_counts():
    silence = Silence(ManualClock())
    for _ in range(100):
        assert not silence.too_long(PING_S)
        silence.heard()


def test_who_was_held_up_does_not_take_that_for_silence():
    clock = ManualClock()
    silence = Silence(clock)
    ask(silence, clock, 0.001)
    clock.now += 3600.0
    assert not silence.too_long(PING_S)


def test_an_answer_that_is_owed_counts_from_the_first_question():
    clock = ManualClock()
    silence = Silence(clock)
    silence.asked()
    clock.now += 1.0
    ask(silence, clock, 0.5)
    assert silence.limit_s == 6.0
