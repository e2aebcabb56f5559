"""One request over several replicas: what its consumer sees, and what the next replica is asked."""

import pytest
from manual_clock import ManualClock

from warmroot.cluster.errors import PoisonRequestError, ReplicaLostError
from warmroot.cluster.ids import ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenDelta, TokenLogprob, derived_seed
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.router.journey import Journey

LOST = ReplicaLostError("lost")
LEFT = ReplicaLostError("left", reason="draining")


def begin(output=(), seed=None, max_losses=3):
    clock = ManualClock()
    source = GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=[1, 2],
        params=SamplingParams(seed=seed, max_tokens=20),
        output_token_ids=list(output),
        priority=2,
        arrival=5.0,
        tenant="t",
        deadline=9.0,
    )
    journey = Journey(source, clock, max_losses)
    journey.taken_by(ReplicaId("a"))
    return journey, source, clock


def delta(index, *tokens, name="r", **fields):
    logprobs = [TokenLogprob(token, -token / 10, 1) for token in tokens]
    return TokenDelta(request_id=RequestId(name), index=index, token_ids=list(tokens), logprobs=logprobs, **fields)


def test_undisturbed_it_only_says_who_computes():
    journey, source, _ = begin()
    assert journey.request() is source
    first = journey.take(delta(0, 7, cached_tokens=1, prompt_logprobs=[None]))
    assert (first.replica, first.cached_tokens, first.prompt_logprobs) == ("a", 1, [None])
    second = delta(1, 8)
    assert journey.take(second) is second


def test_the_next_replica_goes_on_after_what_was_delivered():
    journey, source, clock = begin()
    journey.take(delta(0, 7, 8))
    clock.now += 4.0
    journey.lost(LOST)
    resumed = journey.request()
    assert (resumed.prompt_token_ids, resumed.output_token_ids, resumed.request_id) == ([1, 2], [7, 8], "r~1")
    assert resumed.params.seed == derived_seed(RequestId("r"))
    assert (resumed.age, resumed.priority, resumed.arrival, resumed.tenant, resumed.deadline) == (4.0, 2, 5.0, "t", 9.0)
    journey.taken_by(ReplicaId("b"))
    third = journey.take(delta(2, 9, name="r~1", cached_tokens=4))
    assert (third.request_id, third.index, third.replica, third.cached_tokens) == ("r", 2, "b", None)
    assert journey.take(delta(3, 6, name="r~1")).replica is None
    journey.lost(LOST)
    assert (journey.request().output_token_ids, journey.request().request_id) == ([7, 8, 9, 6], "r~2")
    assert source.output_token_ids == []


def test_a_seed_of_its_own_stays():
    journey, _, _ = begin(seed=11)
    journey.lost(LOST)
    assert journey.request().params.seed == 11


def test_one_that_came_with_output_counts_on():
    journey, _, _ = begin(output=[3])
    assert journey.take(delta(1, 4)).index == 1
    journey.lost(LOST)
    assert journey.request().output_token_ids == [3, 4]


@pytest.mark.parametrize(("index", "tokens", "left"), [(2, [9], [9]), (1, [8, 9, 6], [9, 6]), (0, [7, 8, 9], [9])])
def test_what_was_delivered_before_is_cut_off(index, tokens, left):
    journey, _, _ = begin()
    journey.take(delta(0, 7, 8))
    journey.lost(LOST)
    journey.taken_by(ReplicaId("b"))
    seen = journey.take(delta(index, *tokens, prompt_logprobs=[None]))
    assert (seen.index, seen.token_ids, [entry.token_id for entry in seen.logprobs]) == (2, left, left)
    assert (seen.replica, seen.prompt_logprobs) == ("b", None)


def test_a_delta_with_nothing_new_is_left_out_and_the_next_is_stamped():
    journey, _, _ = begin()
    journey.take(delta(0, 7, 8))
    journey.lost(LOST)
    journey.taken_by(ReplicaId("b"))
    assert journey.take(delta(0, 7)) is None
    assert journey.take(delta(1, 8, 9)).replica == "b"
    last = journey.take(delta(1, 8, finish_reason=FinishReason.STOP, stop_reason=8))
    assert (last.index, last.token_ids, last.finish_reason, last.stop_reason) == (3, [], FinishReason.STOP, 8)


def test_a_replica_that_leaves_tokens_out_is_not_believed():
    journey, _, _ = begin()
    journey.take(delta(0, 7))
    with pytest.raises(ReplicaLostError, match="a has left out 2 tokens"):
        journey.take(delta(3, 9))


@pytest.mark.parametrize("max_losses", [1, 3])
def test_whatever_was_on_several_replicas_as_they_died_is_suspected(max_losses):
    journey, _, _ = begin(max_losses=max_losses)
    for _ in range(max_losses - 1):
        journey.lost(LOST)
    with pytest.raises(PoisonRequestError, match=f"on {max_losses} replicas .*the last: lost"):
        journey.lost(LOST)


def test_taking_leave_is_no_loss():
    journey, _, _ = begin()
    for _ in range(10):
        journey.lost(LEFT)
    assert (journey.num_moves, journey.num_losses) == (10, 0)
