"""Percentiles, summaries, decode speed and bars."""

import math

import pytest

from warmroot.deploy.bench.metrics import Bar, decode_rate, median_ratio, median_summary, percentile, summarize
from warmroot.deploy.bench.peers.protocol import Job, Timing


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentile_interpolates(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_percentile_of_nothing_is_nan() -> None:
    assert math.isnan(percentile([], 50))


def test_summary_of_two_requests() -> None:
    jobs = [Job([0] * 10, 3), Job([0] * 30, 2)]
    timings = [Timing(0.0, [1.0, 2.0, 4.0], cached_tokens=8), Timing(1.0, [3.0, 5.0])]
    summary = summarize(jobs, timings, 2)
    assert summary.wall_s == 5.0
    assert summary.output_tokens_per_s == pytest.approx(1.0)
    assert summary.prompt_tokens_per_s == pytest.approx(8.0)
    assert summary.ttft_mean_s == summary.ttft_p50_s == pytest.approx(1.5)
    assert summary.itl_p50_s == pytest.approx(2.0)
    assert summary.cached_token_rate == pytest.approx(0.2)


def test_decode_rate_counts_only_while_all_streams_decode() -> None:
    # Both decode from 2.0 (second's first token) to 4.0 (first's end): tokens at 2.5, 3.0, 3.5, 4.0.
    timings = [Timing(0.0, [1.0, 1.5, 2.5, 4.0]), Timing(0.0, [2.0, 3.0, 3.5, 9.0])]
    assert decode_rate(timings, 2) == pytest.approx(4 / 2.0)


def test_decode_rate_of_a_single_stream_skips_the_prefills() -> None:
    timings = [Timing(0.0, [5.0, 5.5, 6.0]), Timing(6.0, [16.0, 16.5, 17.0])]
    assert decode_rate(timings, 1) == pytest.approx(4 / 2.0)


def test_decode_rate_is_nan_when_streams_never_meet() -> None:
    assert math.isnan(decode_rate([Timing(0.0, [1.0, 2.0]), Timing(2.0, [3.0, 4.0])], 2))


def test_medians_over_rounds() -> None:
    jobs = [Job([0], 2)]
    rounds = [summarize(jobs, [Timing(0.0, [first, first + 1.0])], 1) for first in (3.0, 1.0, 2.0)]
    assert median_summary(rounds).ttft_p50_s == 2.0
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def test_bars() -> None:
    assert Bar(0.9, 0.9).holds and not Bar(0.89, 0.9).holds
    assert Bar(0.02, 0.02, at_least=False).holds and not Bar(0.03, 0.02, at_least=False).holds
    assert not Bar(math.nan, 0.0).holds and not Bar(math.nan, 0.0, at_least=False).holds
    assert Bar(2.0, 1.0).to_json() == {"value": 2.0, "wanted": 1.0, "op": ">=", "holds": True}
