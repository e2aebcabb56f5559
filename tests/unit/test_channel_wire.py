import contextlib
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.engine_counts import STEP_TOKENS, EngineCounts
from warmroot.cluster.errors import (
    ContextTooLongError,
    OverloadedError,
    ReplicaUnavailableError,
    ServerError,
    WarmrootError,
)
from warmroot.cluster.histogram import HistogramCounts
from warmroot.cluster.ids import Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import (
    FinishReason,
    FirstTokenReport,
    GenerateRequest,
    Load,
    ReplicaInfo,
    TokenDelta,
    TokenLogprob,
)
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.router import wire
from warmroot.router.wire import FrameDecoder, WireError

LOAD = Load(running=1, waiting=2, waiting_tokens=3, kv_used_blocks=4, kv_total_blocks=5, max_num_seqs=6)
COUNTS = EngineCounts(
    steps=HistogramCounts(STEP_TOKENS, tuple(range(len(STEP_TOKENS) + 1)), 90.0),
    busy_s=1.5,
    generation_tokens=5,
    preemptions=4,
    evicted_blocks=3,
    cached_blocks=2,
)
INFO = ReplicaInfo(
    replica=ReplicaId("a"),
    epoch=Epoch(7),
    model="m",
    address="127.0.0.1:1",
    kv_namespace=b"n" * 16,
    block_size=16,
    kv_total_blocks=1000,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_model_len=2048,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
)
PARAMS = SamplingParams(
    temperature=0.5, seed=2**63, stop=("a", "b"), logit_bias={5: 1.5}, bad_words_token_ids=((1, 2),)
)
REQUEST = GenerateRequest(
    request_id=RequestId("r"),
    prompt_token_ids=[1, 2, 3],
    params=PARAMS,
    output_token_ids=[4],
    priority=-1,
    cache_salt="tenant",
    arrival=1.5,
    tenant="t",
    share=0.5,
    deadline=2.5,
    trace="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    is_suspect=True,
)
LOGPROB = TokenLogprob(9, -0.5, 2, ((8, -0.25), (9, -0.5)))
DELTA = TokenDelta(
    request_id=RequestId("r"),
    index=3,
    token_ids=[9, 10],
    logprobs=[LOGPROB, LOGPROB],
    prompt_logprobs=[None, LOGPROB],
    cached_tokens=16,
    finish_reason=FinishReason.STOP,
    stop_reason=2,
    error="why",
    report=FirstTokenReport(queue_s=0.25, prefill_s=1.5),
)
PLAIN = TokenDelta(request_id=RequestId("r"), index=0, token_ids=[5])
MESSAGES = [
    wire.Hello("secret"),
    wire.HelloAck(INFO, LOAD),
    wire.Submit(REQUEST),
    wire.Abort(RequestId("r")),
    wire.Accepted(RequestId("r"), LOAD),
    wire.Deltas([PLAIN, DELTA], LOAD),
    wire.Deltas([], LOAD),
    wire.Ping(),
    wire.Pong(LOAD),
    wire.Pong(LOAD, COUNTS),
    wire.Pong(Load(num_drafts=5, num_draft_tokens=19, accepted_by_place=(4, 3, 1))),
    wire.Pong(Load(num_drafts=5, num_draft_tokens=19)),
]


def body(message):
    return wire.encode(message)[4:]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_went(message):
    assert wire.decode(body(message)) == message


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full", retry_after=2.5),
        ContextTooLongError("long", param="prompt"),
        ReplicaUnavailableError("gone"),
        WireError("bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_and_fields(error):
    back = wire.decode(body(wire.Rejected(RequestId("r"), error, LOAD)))
    assert isinstance(back, wire.Rejected)
    assert type(back.error) is type(error)
    assert (back.error.body(), vars(back.error)) == (error.body(), vars(error))


def test_an_error_unknown_here_is_a_server_error():
    class FutureError(WarmrootError):
        pass

    back = wire.decode(body(wire.Failure(FutureError("new"))))
    assert type(back.error) is ServerError
    assert "new" in back.error.message


def test_a_plain_delta_is_small():
    assert len(body(wire.Deltas([PLAIN] * 10, LOAD))) <= 10 * 7 + 10


def test_frames_are_cut_wherever_the_bytes_break():
    stream = b"".join(map(wire.encode, MESSAGES))
    for size in (1, 2, 3, 7, 1000, len(stream)):
        frames, got = FrameDecoder(wire.MAX_FRAME_BYTES), []
        for at in range(0, len(stream), size):
            frames.feed(stream[at : at + size])
            while (frame := frames.next()) is not None:
                got.append(wire.decode(frame))
        assert got == MESSAGES


def test_a_frame_above_the_limit_is_refused_by_its_length_alone():
    frames = FrameDecoder(100)
    frames.feed((101).to_bytes(4, "big"))
    with pytest.raises(WireError, match="101 bytes exceeds 100"):
        frames.next()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        [-1],
        [-1],
        ["0"],
        [True],
        [0],
        [0, b"bytes", 1],
        [2, "r"],
        [2, "r", b"abc", {}, b"", 0, "", 0.0],
        [2, "r", b"", {"top_k": "nonsense"}, b"", 0, "", 0.0],
        [2, "r", b"", {"temperature": -1}, b"", 0, "", 0.0],
        [1, {"replica": 1}, [0, 0, 0, 0, 1, 1]],
        [6, [[1]], [0, 0, 0, 0, 1, 1]],
        [6, [["r", 0, [1], 77]], [0, 0, 0, 0, 1, 1]],
        [6, [], [0, 0]],
        [8, "load"],
        [9, [1, 2]],
    ],
    ids=repr,
)
def test_what_is_no_message_raises_a_named_error(value):
    with pytest.raises(WireError):
        wire.decode(msgpack.packb(value))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data):
    with contextlib.suppress(WireError):
        wire.decode(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=8)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=15,
)


@settings(max_examples=200)
@given(st.integers(0, 9), st.lists(values, max_size=8))
def test_random_fields_raise_nothing_else(kind, fields):
    with contextlib.suppress(WireError):
        wire.decode(msgpack.packb([kind, *fields]))


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.data())
def test_flipped_bits_raise_nothing_else(message, data):
    damaged = bytearray(body(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(WireError):
        wire.decode(bytes(damaged))


def test_what_a_later_release_adds_is_passed_over():
    """During a rolling update ingresses and replicas of two releases talk to each other."""
    request = GenerateRequest(request_id=RequestId("r"), prompt_token_ids=[1, 2], params=SamplingParams())
    delta = TokenDelta(request_id=RequestId("r"), index=0, token_ids=[5], weights_version="v2")
    for message in (
        wire.Hello("token"),
        wire.Submit(request),
        wire.Abort(RequestId("r")),
        wire.Accepted(RequestId("r"), Load()),
        wire.Rejected(RequestId("r"), WireError("no"), Load()),
        wire.Deltas([delta], Load()),
        wire.Ping(),
        wire.Pong(Load()),
        wire.Draining(),
        wire.Failure(WireError("no")),
        wire.Ask(1, "prepare_weights", {"version": "v2"}),
        wire.Answer(1, {"seconds": 0.5}),
    ):
        fields = msgpack.unpackb(wire.encode(message)[4:])
        decoded = wire.decode(msgpack.packb([*fields, "of tomorrow"]))
        assert type(decoded) is type(message)
        assert wire.encode(decoded) == wire.encode(message)
    kind, deltas, load = msgpack.unpackb(wire.encode(wire.Deltas([delta], Load()))[4:])
    longer = wire.decode(msgpack.packb([kind, [[*deltas[0], "of tomorrow"]], load]))
    assert longer == wire.Deltas([delta], Load())
    assert wire.decode(msgpack.packb([99, "a kind of tomorrow"])) == wire.Unknown()


def test_a_request_with_parameters_of_a_later_release_is_told_apart():
    request = GenerateRequest(request_id=RequestId("r"), prompt_token_ids=[1, 2], params=SamplingParams(top_k=3))
    fields = msgpack.unpackb(wire.encode(wire.Submit(request))[4:])
    fields[3] |= {"of_tomorrow": 1, "also_new": 2}
    assert wire.decode(msgpack.packb(fields)) == wire.Unreadable(RequestId("r"), ("also_new", "of_tomorrow"))


def test_a_request_of_the_release_before_is_understood():
    kind, *fields = msgpack.unpackb(body(wire.Submit(REQUEST)), strict_map_key=False)
    before = wire.decode(msgpack.packb([kind, *fields[:-1]]))
    assert isinstance(before, wire.Submit) and before.request == replace(REQUEST, is_suspect=False)
