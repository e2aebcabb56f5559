"""Plans and results survive the wire exactly."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.actors.engine.draft_tree import Draft
from warmroot.actors.engine.plan import NewSequence, SequenceResult, SequenceStep, StepPlan, StepResult
from warmroot.actors.engine.plan_wire import (
    Delivery,
    decode_delivery,
    decode_result,
    encode_delivery,
    encode_result,
)
from warmroot.cluster.messages import TokenLogprob
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.router.wire import WireError

ids = st.text(max_size=12)
counts = st.integers(0, 2**31 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)
tables = st.lists(st.lists(counts, max_size=4), max_size=3).map(tuple)
floats = st.floats(allow_nan=False)

params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 100),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(counts, min_size=1, max_size=3).map(tuple),
    bad_words_token_ids=st.lists(st.lists(counts, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
new_sequences = st.builds(
    NewSequence,
    request_id=ids,
    token_ids=tokens,
    num_prompt_tokens=counts,
    params=params,
    seed=st.integers(-(2**63), 2**64 - 1),
    num_computed=counts,
    block_tables=tables,
)
guesses = st.lists(counts, max_size=4).map(tuple)
drafts = guesses.map(Draft) | guesses.map(lambda ids: Draft(ids, tuple(place // 2 - 1 for place in range(len(ids)))))
steps = st.builds(
    SequenceStep,
    request_id=ids,
    num_computed=counts,
    num_tokens=counts,
    samples=st.booleans(),
    new_blocks=tables,
    draft=drafts,
    num_drafts=st.integers(0, 8),
)
plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**62),
    finished=st.lists(ids, max_size=3).map(tuple),
    new=st.lists(new_sequences, max_size=2).map(tuple),
    sequences=st.lists(steps, max_size=4).map(tuple),
    copies=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
    least_probability=floats,
)
deliveries = st.builds(Delivery, plans, st.lists(st.tuples(ids, tokens), max_size=3).map(tuple))
logprobs = st.builds(TokenLogprob, counts, floats, counts, st.lists(st.tuples(counts, floats), max_size=3).map(tuple))
answers = st.builds(
    SequenceResult,
    request_id=ids,
    token_ids=tokens,
    logprobs=st.none() | st.lists(logprobs, max_size=2),
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=2),
    draft=drafts,
)
results = st.builds(
    StepResult, step=st.integers(0, 2**62), sequences=st.lists(answers, max_size=4), error=st.none() | st.text()
)


@settings(max_examples=60, deadline=None)
@given(deliveries)
def test_a_plan_survives_the_wire(delivery: Delivery):
    assert decode_delivery(encode_delivery(delivery)) == delivery


@settings(max_examples=60, deadline=None)
@given(results)
def test_a_result_survives_the_wire(result: StepResult):
    assert decode_result(encode_result(result)) == result


def test_containers_keep_their_types():
    table = ([1, 2], [])
    plan = StepPlan(
        step=1,
        finished=("a",),
        sequences=(SequenceStep(request_id="b", num_computed=0, num_tokens=1, samples=True, new_blocks=table),),
        copies=((3, 4),),
    )
    decoded = decode_delivery(encode_delivery(Delivery(plan, (("b", [7]),))))
    assert decoded.plan.sequences[0].new_blocks == table
    assert isinstance(decoded.plan.copies[0], tuple)
    assert hash(decoded.plan.finished) == hash(("a",))


def test_a_decode_step_of_64_sequences_is_small():
    step = [
        SequenceStep(request_id=f"cmpl-{n:032x}", num_computed=1000 + n, num_tokens=1, samples=True, new_blocks=([],))
        for n in range(64)
    ]
    assert len(encode_delivery(Delivery(StepPlan(step=10**6, sequences=tuple(step))))) < 64 * 50


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\xc0", b"\x96\x01\x90\x90\x90\x90\x93"])
def test_what_is_no_message_raises_wire_error(data: bytes):
    for decode in (decode_delivery, decode_result):
        with pytest.raises(WireError, match="not a message of the gang"):
            decode(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_decode_or_raise_wire_error(data: bytes):
    for decode in (decode_delivery, decode_result):
        with suppress(WireError):
            decode(data)
