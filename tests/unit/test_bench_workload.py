"""Seeded workloads with exact lengths."""

import random

from warmroot.deploy.bench.workload import LengthRange, Workloads, prefill_only, sentences


def encode(text: str) -> list[int]:
    """A tokenizer of one token per character."""
    return [ord(character) for character in text]


def test_prompts_have_the_length_asked_for() -> None:
    workloads = Workloads(encode, 0)
    assert [len(workloads.prompt(n)) for n in (1, 17, 5000)] == [1, 17, 5000]


def test_distinct_requests_lie_in_their_ranges() -> None:
    jobs = Workloads(encode, 1).distinct(50, LengthRange(10, 20), LengthRange(3, 5))
    lengths = {len(job.prompt) for job in jobs}
    assert lengths <= set(range(10, 21)) and len(lengths) > 5
    assert {job.max_tokens for job in jobs} == {3, 4, 5}
    assert len({tuple(job.prompt[:8]) for job in jobs}) == 50


def test_equal_seeds_give_equal_workloads() -> None:
    first, second, other = (Workloads(encode, seed).distinct(4) for seed in (7, 7, 8))
    assert first == second != other


def test_shared_prefix_is_shared_and_nothing_more() -> None:
    jobs = Workloads(encode, 2).shared_prefix(8, 64, LengthRange(16, 32), LengthRange(1, 1))
    assert len({tuple(job.prompt[:64]) for job in jobs}) == 1
    assert len({tuple(job.prompt[64:80]) for job in jobs}) == 8
    assert all(80 <= len(job.prompt) <= 96 for job in jobs)


def test_many_prefixes_come_mixed() -> None:
    jobs = Workloads(encode, 3).many_prefixes(4, 5, LengthRange(32, 32), LengthRange(8, 8), LengthRange(2, 2))
    heads = [tuple(job.prompt[:32]) for job in jobs]
    assert len(jobs) == 20
    assert sorted(heads.count(head) for head in set(heads)) == [5, 5, 5, 5]
    assert len(set(heads[:5])) > 1


def test_arrivals_have_the_rate_asked_for() -> None:
    arrivals = Workloads(encode, 4).arrivals(4000, 8.0)
    assert arrivals == sorted(arrivals)
    assert 0.9 < arrivals[-1] / (4000 / 8.0) < 1.1


def test_prefill_only_keeps_prompts() -> None:
    jobs = Workloads(encode, 5).distinct(3)
    assert [(job.prompt, job.max_tokens) for job in prefill_only(jobs)] == [(job.prompt, 1) for job in jobs]


def test_text_reads_like_prose() -> None:
    text = sentences(random.Random(0))
    head, body = next(text), next(text)
    assert head.endswith(".") and " page " in head
    assert body[0] == " " and body[1].isupper() and len(body.split()) > 6
