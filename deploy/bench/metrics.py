"""What timings say: throughput, TTFT, ITL and pure decode speed, and how rounds are compared."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .peers.protocol import Job, Timing


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, or the medians of several. Seconds, and tokens per second."""

    wall_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Prompt tokens over the whole run: the prefill speed if every request has one output token."""
    decode_tokens_per_s: float
    """While all streams decode and none prefills; NaN if that never was so."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    cached_token_rate: float
    """Cached prompt tokens / prompt tokens."""


def summarize(jobs: list[Job], timings: list[Timing], concurrency: int) -> Summary:
    """The figures of one run."""
    wall = max(timing.token_times[-1] for timing in timings)
    ttft = [timing.token_times[0] - timing.start for timing in timings]
    gaps = [
        later - earlier
        for timing in timings
        for earlier, later in zip(timing.token_times, timing.token_times[1:], strict=False)
    ]
    num_prompt = sum(len(job.prompt) for job in jobs)
    return Summary(
        wall_s=wall,
        output_tokens_per_s=sum(len(timing.token_times) for timing in timings) / wall,
        prompt_tokens_per_s=num_prompt / wall,
        decode_tokens_per_s=decode_rate(timings, concurrency),
        ttft_mean_s=statistics.fmean(ttft),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        cached_token_rate=sum(timing.cached_tokens for timing in timings) / num_prompt,
    )


def decode_rate(timings: list[Timing], concurrency: int) -> float:
    """Tokens per second over the stretches of time in which ``concurrency`` streams decode and none prefills."""
    changes: list[tuple[float, int]] = []
    for timing in timings:
        changes += [(timing.token_times[0], 1), (timing.token_times[-1], -1)]
    changes.sort()
    decoding, since, seconds, tokens = 0, 0.0, 0.0, 0
    moments = sorted(moment for timing in timings for moment in timing.token_times)
    cursor = 0
    for moment, change in changes:
        if decoding == concurrency:
            while cursor < len(moments) and moments[cursor] <= since:
                cursor += 1
            first = cursor
            while cursor < len(moments) and moments[cursor] <= moment:
                cursor += 1
            seconds, tokens = seconds + moment - since, tokens + cursor - first
        decoding, since = decoding + change, moment
    return tokens / seconds if seconds else math.nan


def median_summary(rounds: Sequence[Summary]) -> Summary:
    """Field by field."""
    return Summary(
        **{name: statistics.median(getattr(summary, name) for summary in rounds) for name in Summary.__slots__}
    )


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios round by round: what slows a whole round down cancels out."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound that a figure has to meet."""

    value: float
    wanted: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether it does; NaN does not."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    def to_json(self) -> dict[str, float | bool | str]:
        """For the report."""
        return {"value": self.value, "wanted": self.wanted, "op": ">=" if self.at_least else "<=", "holds": self.holds}
