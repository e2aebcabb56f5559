"""The verdict on a soak: what grows, slows down or is lost is named."""

from dataclasses import replace

import pytest

from .samples import Sample, Use
from .soak import judged


def steady(count: int = 60) -> list[Sample]:
    use = {"replica": Use(2, 10**9, 5 * 10**8, 200, 80), "ingress": Use(2, 10**8, 9 * 10**7, 60, 20)}
    latency = {"p50": 0.5, "p90": 0.8, "p99": 1.0}
    one = Sample(0.0, use, 10, 10**6, 60, latency, latency, 0)
    return [replace(one, at_s=60.0 * n) for n in range(count)]


def changed(samples: list[Sample], name: str, by: float) -> list[Sample]:
    """A figure of the replicas that rises by so much a sample."""
    return [
        replace(
            one,
            use=one.use
            | {"replica": replace(one.use["replica"], **{name: int(getattr(one.use["replica"], name) + by * n)})},
        )
        for n, one in enumerate(samples)
    ]


def test_a_steady_run_has_no_problems():
    trends, problems = judged(steady())
    assert problems == []
    assert trends["replica"]["private_bytes"]["growth"] == 0.0


@pytest.mark.parametrize(
    ("name", "by", "word"),
    [
        ("private_bytes", 10**6, "memory: private_bytes of replica grew by 9.2%"),
        ("rss_bytes", 10**6, "memory: rss_bytes of replica grew by 4.6%"),
        ("descriptors", 0.2, "descriptors: those of replica grew by 9"),
    ],
)
def test_growth_is_a_problem(name: str, by: float, word: str):
    _, problems = judged(changed(steady(), name, by))
    assert [problem[: len(word)] for problem in problems] == [word]


def test_slower_answers_and_lost_requests_are_problems():
    samples = [replace(one, answered_in_s={"p50": 0.5 + 0.01 * n}) for n, one in enumerate(steady())]
    samples[30] = replace(samples[30], lost=2)
    _, problems = judged(samples)
    assert problems[0] == "lost: 2 requests before 1800 s"
    assert problems[1].startswith("latency: answered_in_s is 1.")


def test_redis_may_fill_to_its_bound_and_no_further():
    samples = [replace(one, redis_bytes=10**6 * (1 + n)) for n, one in enumerate(steady())]
    assert judged(samples)[1] == []
    assert judged([replace(one, redis_bytes=10**8) for one in samples])[1] == [
        "memory: Redis holds 100000000 bytes, more than 83886080"
    ]
