"""A leak is seen through noise, and noise is no leak."""

import random

import pytest

from .trend import MOST_GROWTH, fit, slower


def test_a_line_is_found_and_the_warm_up_left_out():
    samples = [0.0] * 20 + [100.0 + n for n in range(80)]
    trend = fit(samples)
    assert (trend.first, trend.last) == (pytest.approx(100.0), pytest.approx(179.0))
    assert trend.growth == pytest.approx(0.79)


def test_a_leak_of_three_percent_is_seen_through_noise_of_two():
    draw = random.Random(1)
    noisy = [1000 * (1 + draw.uniform(-0.02, 0.02)) for _ in range(120)]
    assert abs(fit(noisy).growth) < MOST_GROWTH
    leaking = [value + 0.3 * n for n, value in enumerate(noisy)]
    assert fit(leaking).growth > MOST_GROWTH


def test_few_samples_have_no_slope():
    assert fit([]).change == fit([5.0]).change == 0.0
    assert slower([]) == 1.0


def test_slower_compares_the_last_third_with_the_first():
    assert slower([1.0] * 50) == 1.0
    assert slower([9.0] * 20 + [1.0] * 40 + [2.0] * 40) == 2.0
