"""What comes over sockets and out of the bus: frames, plans, cache events, announcements."""

import zlib
from typing import Any

import msgpack
from fuzz_target import Target

from warmroot.actors.engine.draft_tree import Draft
from warmroot.actors.engine.plan import NewSequence, SequenceResult, SequenceStep, StepPlan, StepResult
from warmroot.actors.engine.plan_wire import (
    Delivery,
    decode_delivery,
    decode_result,
    encode_delivery,
    encode_result,
)
from warmroot.cluster.errors import OverloadedError
from warmroot.cluster.ids import BlockHash, BlockId, Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import (
    FinishReason,
    FirstTokenReport,
    GenerateRequest,
    Load,
    ModelCard,
    RankInfo,
    ReplicaInfo,
    StartupNote,
    TokenDelta,
    TokenLogprob,
)
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store import announcements
from warmroot.kv_store.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEventBatch,
    SnapshotPart,
    decode,
    encode,
)
from warmroot.kv_store.hot_prefixes import HotPrefix, merge_hot
from warmroot.router import wire
from warmroot.router.peers import Peers
from warmroot.router.wire import WireError

LOAD = Load(running=3, waiting=1, kv_total_blocks=9, num_drafts=2, num_draft_tokens=5, accepted_by_place=(2, 1))
INFO = ReplicaInfo(
    replica=ReplicaId("r0"),
    epoch=Epoch(7),
    model="m",
    address="127.0.0.1:1",
    kv_namespace=b"n" * 16,
    block_size=16,
    kv_total_blocks=100,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_model_len=512,
    prefill_tokens_per_s=1e3,
    decode_step_s=0.01,
    ranks=(RankInfo(rank=0, stage=0, host="h", pid=1, memory_bytes=2, last_step=3),),
)
LOGPROBS = [TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, -1.5)))]
PARAMS = SamplingParams(
    temperature=0.5, logit_bias={3: 1.0}, stop_token_ids=(4,), bad_words_token_ids=((1, 2),), seed=9
)
REQUEST = GenerateRequest(
    request_id=RequestId("a/1"),
    prompt_token_ids=[1, 2, 3],
    params=PARAMS,
    output_token_ids=[4],
    cache_salt="t",
    arrival=1.5,
)


def _trees(frames: list[bytes]) -> list[Any]:
    return [msgpack.unpackb(frame, strict_map_key=False) for frame in frames]


def _pack(tree: Any) -> bytes:
    return msgpack.packb(tree)


def message_seeds() -> list[Any]:
    delta = TokenDelta(request_id=RequestId("a"), index=0, token_ids=[5])
    last = TokenDelta(
        request_id=RequestId("a"),
        index=1,
        token_ids=[6],
        logprobs=LOGPROBS,
        prompt_logprobs=[None, *LOGPROBS],
        cached_tokens=2,
        finish_reason=FinishReason.STOP,
        stop_reason=6,
        report=FirstTokenReport(queue_s=0.5, prefill_s=0.25),
    )
    messages: list[wire.Message] = [
        wire.Hello("t"),
        wire.HelloAck(INFO, LOAD),
        wire.Submit(REQUEST),
        wire.Abort(RequestId("a")),
        wire.Accepted(RequestId("a"), LOAD),
        wire.Rejected(RequestId("a"), OverloadedError("full", retry_after=2.0), LOAD),
        wire.Deltas([delta, last], LOAD),
        wire.Ping(),
        wire.Pong(LOAD),
        wire.Failure(WireError("no")),
    ]
    return _trees([wire.encode(message)[4:] for message in messages])


def read_message(data: bytes) -> None:
    message = wire.decode(data)
    if isinstance(message, wire.FromLater):
        return
    frame = wire.encode(message)
    again = wire.encode(wire.decode(frame[4:]))
    assert again == frame, "what was decoded does not come back"


def read_frames(data: bytes) -> None:
    """The same frames come out however the bytes are cut, and none above the limit is waited for."""
    whole, torn = wire.FrameDecoder(256), wire.FrameDecoder(256)
    whole.feed(data)
    frames = list(iter(whole.next, None))
    torn_frames: list[bytes] = []
    for at in range(0, len(data), 3):
        torn.feed(data[at : at + 3])
        torn_frames += iter(torn.next, None)
    assert frames == torn_frames
    assert data.startswith(b"".join(len(body).to_bytes(4, "big") + body for body in frames))


def frame_seeds() -> list[Any]:
    frames = [wire.encode(wire.Ping()), wire.encode(wire.Hello("t" * 40)), wire.encode(wire.Submit(REQUEST))]
    return [b"".join(frames), b"\x00\x00\x00\x00", frames[2]]


def delivery_seeds() -> list[Any]:
    tables = ([BlockId(1), BlockId(2)],)
    new = NewSequence(
        request_id=RequestId("a"),
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        params=PARAMS,
        seed=9,
        num_computed=0,
        block_tables=tables,
    )
    step = SequenceStep(
        request_id=RequestId("a"),
        num_computed=0,
        num_tokens=3,
        samples=True,
        new_blocks=tables,
        draft=Draft((5, 6), (-1, 0)),
        num_drafts=2,
    )
    plan = StepPlan(step=4, finished=(RequestId("b"),), new=(new,), sequences=(step,), copies=((1, 2),))
    return _trees([encode_delivery(Delivery(plan, ((RequestId("a"), [7]),)))])


def read_delivery(data: bytes) -> None:
    again = encode_delivery(decode_delivery(data))
    assert encode_delivery(decode_delivery(again)) == again


def result_seeds() -> list[Any]:
    answer = SequenceResult(
        request_id=RequestId("a"), token_ids=[5], logprobs=LOGPROBS, prompt_logprobs=LOGPROBS, draft=Draft((1,))
    )
    return _trees([encode_result(StepResult(step=4, error=None, sequences=[answer]))])


def read_result(data: bytes) -> None:
    again = encode_result(decode_result(data))
    assert encode_result(decode_result(again)) == again


def event_seeds() -> list[Any]:
    hashes = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))
    events = (
        SnapshotPart(0),
        BlocksStored(BlockHash(b"r" * 16), hashes, bytes(2 * 4 * 4)),
        BlocksRemoved(hashes[1:]),
        CacheCleared(),
    )
    batch = KvEventBatch(ReplicaId("r0"), Epoch(1), 5, events)
    return [*_trees([encode(batch)]), encode(batch, compress=True)]


def _pack_or_keep(tree: Any) -> bytes:
    return tree if isinstance(tree, bytes) else _pack(tree)


def read_events(data: bytes) -> None:
    batch = decode(data)
    assert decode(encode(batch)) == batch == decode(encode(batch, compress=True))


def info_seeds() -> list[Any]:
    return _trees([announcements.pack_info(INFO)])


def read_info(data: bytes) -> None:
    info = announcements.unpack_info(data)
    packed = announcements.pack_info(info)
    assert announcements.pack_info(announcements.unpack_info(packed)) == packed


def card_seeds() -> list[Any]:
    card = ModelCard(
        model="m",
        names=("m", "alias"),
        tokenizer={"tokenizer": "{}", "special_tokens": {}, "chat_template": None},
        max_model_len=64,
        vocab_size=9,
        token="secret",
        routing_policy="warm_prefix",
        limits={"connect_timeout": 3.0},
    )
    return [_inflated(announcements.pack_card(card))]


def _inflated(data: bytes) -> Any:
    return msgpack.unpackb(zlib.decompress(data), strict_map_key=False)


def _deflated(tree: Any) -> bytes:
    return zlib.compress(_pack(tree), 1)


def read_card(data: bytes) -> None:
    card = announcements.unpack_card(data)
    packed = announcements.pack_card(card)
    assert announcements.pack_card(announcements.unpack_card(packed)) == packed


def note_seeds() -> list[Any]:
    return _trees([announcements.pack_note(StartupNote(stage="load", done=1, total=2))])


def read_note(data: bytes) -> None:
    note = announcements.unpack_note(data)
    packed = announcements.pack_note(note)
    assert announcements.pack_note(announcements.unpack_note(packed)) == packed


def hot_seeds() -> list[Any]:
    prefix = HotPrefix(BlockHash(b"n" * 16), 4, b"t" * 16, 1.0, 0.5, "s")
    return [_inflated(announcements.pack_hot([prefix]))]


def read_hot(data: bytes) -> None:
    hot = announcements.unpack_hot(data)
    merge_hot([hot, hot], 8)
    for prefix in hot:
        assert len(prefix.namespace) == 16 and prefix.block_size > 0 and len(prefix.tokens) % 4 == 0
    assert [prefix.tokens for prefix in announcements.unpack_hot(announcements.pack_hot(hot))] == [
        p.tokens for p in hot
    ]


def read_word(data: bytes) -> None:
    """A router's word, and all that is done with it."""
    now = 0.0
    peers = Peers("me", lambda: now)
    peers.hear(data)
    peers.word(everything=True)
    now = 1000.0
    peers.expire()


def word_seeds() -> list[Any]:
    return [[1, "other", True, {"r0": [1, 100, 50, 0.5]}, [["r0", 0.2, b"m" * 16]]]]


BUS = (ValueError,)
TARGETS = (
    Target("wire", read_message, message_seeds, (WireError,), _pack),
    Target("frames", read_frames, frame_seeds, (WireError,)),
    Target("plan_wire", read_delivery, delivery_seeds, (WireError,), _pack),
    Target("result_wire", read_result, result_seeds, (WireError,), _pack),
    Target("kv_events", read_events, event_seeds, BUS, _pack_or_keep),
    Target("announcement", read_info, info_seeds, BUS, _pack),
    Target("model_card", read_card, card_seeds, BUS, _deflated),
    Target("startup_note", read_note, note_seeds, BUS, _pack),
    Target("hot_prefixes", read_hot, hot_seeds, BUS, _deflated),
    Target("router_word", read_word, word_seeds, BUS, _pack),
)
