"""Several plans in flight: chunks and decodes follow each other at once, and outputs are the same."""

import pytest
from engine_harness import Harness, expected_output

from warmroot.cluster.errors import InvalidRequestError
from warmroot.cluster.messages import FinishReason

PROMPT = [1, 2, 0, 1, 2, 2, 0, 1, 1, 0]
OUTPUT = expected_output(PROMPT, 12, 50)


def harness(**options) -> Harness:
    return Harness(**{"vocab_size": 50, "max_in_flight": 2, "chains": True} | options)


def land(h: Harness) -> None:
    h.record(h.engine.end(h.executor.result()))
    h.check()


def rows(h: Harness, step: int) -> list[tuple[str, int, int, bool]]:
    """(request, tokens computed before, tokens, samples) of a plan."""
    return [(s.request_id, s.num_computed, s.num_tokens, s.samples) for s in h.executor.plans[step - 1].sequences]


def test_decodes_follow_the_step_that_samples_their_token():
    h = harness()
    h.add("a", PROMPT, max_tokens=3)
    assert h.engine.begin_all() and h.engine.num_in_flight == 2
    assert rows(h, 1) == [("a", 0, 10, True)] and rows(h, 2) == [("a", 10, 1, True)]
    land(h)
    assert h.output("a") == OUTPUT[:1]
    assert h.engine.begin_all() and h.engine.num_in_flight == 2
    land(h)
    # Its length is known: nothing runs beyond it.
    assert not h.engine.begin() and h.engine.num_in_flight == 1
    land(h)
    assert h.output("a") == OUTPUT[:3] and h.finish("a") is FinishReason.LENGTH
    assert not h.engine.has_work and len(h.executor.plans) == 3


def test_what_ran_beyond_the_end_is_ignored():
    h = harness()
    h.add("a", PROMPT, max_tokens=12, stop_token_ids=(OUTPUT[2],))
    h.add("b", PROMPT[::-1], max_tokens=12)
    while "a" not in h.deltas or h.finish("a") is None:
        h.engine.begin_all()
        land(h)
    assert h.output("a") == OUTPUT[:3] and h.finish("a") is FinishReason.STOP
    held = h.engine.cache.pool.num_used
    assert ("a", 12, 1, True) in rows(h, 4) and h.engine.num_in_flight == 1
    with pytest.raises(InvalidRequestError, match="running already"):
        h.add("a", PROMPT)
    land(h)
    assert h.engine.cache.pool.num_used < held
    h.add("a", PROMPT + OUTPUT[:3] + [7], max_tokens=2)
    h.run()
    assert h.output("b") == expected_output(PROMPT[::-1], 12, 50)
    assert h.deltas["a"][-1].index == 1 and h.deltas["a"][-1].finish_reason is FinishReason.LENGTH
    # Of the first turn's 13 tokens three blocks of 4 were computed with known tokens.
    assert h.deltas["a"][-2].cached_tokens == 12
    assert h.engine.cache.pool.num_used == 0


def test_an_abort_with_two_steps_in_flight():
    h = harness()
    h.add("a", PROMPT, max_tokens=9)
    h.engine.begin_all()
    h.engine.abort("a")
    for _ in range(2):
        assert h.engine.cache.pool.num_used == 3 and h.engine.has_work
        land(h)
    assert not h.deltas and not h.engine.has_work and h.engine.cache.pool.num_used == 0
    assert not h.engine.begin()


def test_without_chains_only_chunks_follow_each_other():
    h = harness(max_in_flight=4, chains=False, max_num_batched_tokens=8)
    h.add("a", [1] * 20, max_tokens=3)
    h.engine.begin_all()
    assert [rows(h, step) for step in (1, 2, 3)] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 4, True)],
    ]
    assert h.engine.num_in_flight == 3
    h.run()
    assert h.output("a") == expected_output([1] * 20, 3, 50)


def test_a_copied_block_is_copied_once():
    h = harness()
    h.add("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    h.run()
    h.add("b", [1, 2, 3, 4, 5, 6, 9], max_tokens=4)
    h.engine.begin_all()
    assert [len(plan.copies) for plan in h.executor.plans[-2:]] == [1, 0]
    h.run()
    assert h.output("b") == expected_output([1, 2, 3, 4, 5, 6, 9], 4, 50)


def test_no_page_for_a_step_on_trust():
    """It waits for the step in flight, instead of taking another request's pages."""
    h = harness(num_blocks=7, enable_prefix_caching=False)
    h.add("a", PROMPT, max_tokens=9)
    h.add("b", PROMPT[::-1], max_tokens=9)
    h.run()
    assert h.output("a") == OUTPUT[:9] and h.output("b") == expected_output(PROMPT[::-1], 9, 50)
    assert sum(new.request_id == "a" for plan in h.executor.plans for new in plan.new) == 1


def test_a_failure_ends_what_is_in_flight():
    h = harness(fail_at=2)
    h.add("a", PROMPT, max_tokens=9)
    h.run()
    assert h.finish("a") is FinishReason.LOST and h.output("a") == OUTPUT[:1]
    assert h.engine.num_in_flight == 0 and h.engine.cache.pool.num_used == 0


def test_throughput_counts_no_second_twice():
    h = harness(max_num_queued_reqs=1, max_num_seqs=1)
    h.add("a", PROMPT, max_tokens=100)
    for _ in range(300):
        if h.engine.has_work:
            h.step()
    assert 30 / h.engine._throughput.per_s == pytest.approx(30, rel=0.3)  # a token per step of one second
