"""What an engine does with more than it can: deadlines, bounds by tokens, tenants in turn."""

import pytest
from engine_harness import Harness
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.errors import OverloadedError
from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams


def request(name, prompt, max_tokens=1, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params, **fields)


class Overloaded(Harness):
    """Its wall clock is an hour ahead of the engine's."""

    def __init__(self, **config):
        super().__init__(**config)
        self.engine._wall = lambda: self.clock.now + 3600

    def submit(self, name, prompt, *, left=None, **fields):
        deadline = 0.0 if left is None else self.clock.now + 3600 + left
        self.engine.add(request(name, prompt, deadline=deadline, **fields))

    def second(self, count=1):
        for _ in range(count):
            self.step()

    def starts(self):
        """Names in the order in which they began."""
        return [new.request_id for plan in self.executor.plans for new in plan.new]


def test_a_request_that_waited_past_its_deadline_is_never_computed():
    h = Overloaded(max_num_seqs=1)
    h.submit("runs", [1] * 4, max_tokens=6)
    h.submit("waits", [2] * 4, left=2.5)
    h.second(8)
    assert h.finish("waits") is FinishReason.DEADLINE and h.output("waits") == []
    assert "before its first token" in h.deltas["waits"][-1].error
    assert "waits" not in h.starts() and h.finish("runs") is FinishReason.LENGTH
    h.check()
    assert h.engine.cache.pool.num_used == 0 and not h.engine.has_work


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_running_request_ends_at_its_deadline_and_frees_its_pages(in_flight):
    h = Overloaded(max_in_flight=in_flight, chains=in_flight > 1)
    h.submit("late", [1] * 4, max_tokens=30, left=3.5)
    h.submit("free", [2] * 4, max_tokens=8)
    h.second(20)
    assert h.finish("late") is FinishReason.DEADLINE and 1 <= len(h.output("late")) < 30
    assert f"after {len(h.output('late'))} tokens" in h.deltas["late"][-1].error
    assert h.finish("free") is FinishReason.LENGTH and len(h.output("free")) == 8
    assert h.engine.cache.pool.num_used == 0 and not h.engine.has_work


def test_the_queue_is_bounded_by_tokens_that_are_not_cached():
    h = Overloaded(max_num_seqs=1, max_num_queued_tokens=10, num_blocks=40)
    h.submit("a", [1] * 4, max_tokens=4)
    h.second()
    h.submit("larger than the bound", [2] * 15)
    with pytest.raises(OverloadedError, match="with 15 tokens"):
        h.submit("b", [0, 1])
    h.submit("moved", [0, 1], age=1.0)
    h.run()
    h.submit("c", [1] * 4, max_tokens=4)
    h.second()
    h.submit("d", [2] * 15 + [1])  # one block and a bit are not cached
    h.submit("e", [1, 0, 1])
    h.run()
    assert all(h.finish(name) is FinishReason.LENGTH for name in "acde")


def test_retry_after_is_the_time_until_there_is_room():
    h = Overloaded(max_num_seqs=1, max_num_queued_tokens=80, num_blocks=100, enable_prefix_caching=False)
    for n in range(10):
        h.submit(f"q{n}", [n % 3] * 8)
    with pytest.raises(OverloadedError) as refused:
        h.submit("x", [1] * 16)
    assert refused.value.retry_after == 1.0  # nothing was measured
    h.second(8)  # a request of 8 tokens in each
    for n in range(10, 18):
        h.submit(f"q{n}", [2] * 8)
    with pytest.raises(OverloadedError) as refused:
        h.submit("x", [0] * 16)
    wait = refused.value.retry_after
    assert wait == pytest.approx(2.0, rel=0.3)  # 16 tokens of room, 8 a second
    h.second(round(wait) + 1)
    h.submit("x", [0] * 16)


def test_tenants_take_turns_whoever_has_more_waiting():
    h = Overloaded(max_num_seqs=1, num_blocks=100)
    for n in range(12):
        h.submit(f"many{n}", [n % 3, *divmod(n, 3), 1], tenant="many")
    for n in range(3):
        h.submit(f"few{n}", [2, n, 2, n], tenant="few")
    h.run()
    assert [name for name in h.starts()[:8] if name.startswith("few")] == ["few0", "few1", "few2"]


def test_priority_comes_before_tenants():
    h = Overloaded(max_num_seqs=1, num_blocks=100)
    for n in range(4):
        h.submit(f"urgent{n}", [n % 3] * 4, tenant="a", priority=-1)
    h.submit("b", [1, 2, 1, 2], tenant="b")
    h.run()
    assert h.starts()[-1] == "b"


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=8),
    outputs=st.lists(st.integers(1, 6), min_size=4, max_size=8),
    max_num_seqs=st.integers(1, 3),
)
def test_tenants_with_work_are_served_in_proportion_to_their_shares(shares, lengths, outputs, max_num_seqs):
    h = Overloaded(max_num_seqs=max_num_seqs, num_blocks=200, enable_prefix_caching=False, max_num_batched_tokens=16)
    largest = max(lengths) + max(outputs)
    for tenant, share in enumerate(shares):
        for n in range(40):
            prompt = [(tenant + n) % 3] * lengths[n % len(lengths)]
            h.submit(f"{tenant}/{n}", prompt, max_tokens=outputs[n % len(outputs)], tenant=str(tenant), share=share)
    served = [0] * len(shares)
    while len({r.tenant for r in h.engine.scheduler.waiting}) == len(shares):
        h.step()
        step = h.executor.plans[-1]
        assert step.sequences  # never idle while something waits
        for sequence in step.sequences:
            served[int(sequence.request_id.split("/")[0])] += sequence.num_tokens
        for a in range(len(shares)):
            for b in range(len(shares)):
                # One request each for those that run, and one that was charged at last.
                slack = (max_num_seqs + 1) * largest * (1 / shares[a] + 1 / shares[b])
                assert abs(served[a] / shares[a] - served[b] / shares[b]) <= slack
    h.run(4000)
    assert all(h.finish(f"{tenant}/{n}") is FinishReason.LENGTH for tenant in range(len(shares)) for n in range(40))


def test_the_number_of_waiting_requests_is_bounded_whatever_is_cached():
    h = Overloaded(max_num_seqs=1, max_num_queued_reqs=1, num_blocks=40)
    cached = [1, 2] * h.executor.layout.block_size
    h.submit("first", cached, max_tokens=1)
    h.run()
    h.submit("runs", [0] * 3, max_tokens=9)
    h.second()
    h.submit("waits", cached)  # every block of it is there
    with pytest.raises(OverloadedError):
        h.submit("too many", [2] * 3)


def test_a_queue_that_ends_by_an_abort_is_not_watched_any_more():
    h = Overloaded(max_num_seqs=1, max_num_queued_tokens=40, num_blocks=100, enable_prefix_caching=False)

    def refused():
        """Seconds to wait, where two more are too many."""
        h.submit("runs", [1] * 4, max_tokens=6)
        h.second()
        for name in "ab":
            h.submit(name, [2] * 20)
        h.second()
        with pytest.raises(OverloadedError) as error:
            h.submit("c", [2] * 20)
        for name in ("a", "b", "runs"):
            h.engine.abort(name)
        h.run()
        return error.value.retry_after

    h.submit("before", [1] * 4, max_tokens=2)
    h.submit("after it", [2] * 20)
    h.run()
    soon = refused()
    h.clock.now += 3600.0
    assert refused() < 3 * soon
