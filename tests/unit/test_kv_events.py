import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroot.kv_store import events
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch, decode, encode

HASHES = st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=5).map(tuple)
STORED = HASHES.flatmap(
    lambda hashes: st.builds(
        BlocksStored,
        st.binary(min_size=16, max_size=16),
        st.just(hashes),
        st.integers(1, 4).map(lambda size: b"\x01\x02\x03\x04" * size * len(hashes)),
        st.sampled_from(["device", "host"]),
    )
)
EVENTS = st.one_of(STORED, st.builds(BlocksRemoved, HASHES), st.just(CacheCleared()))
BATCHES = st.builds(
    KvEventBatch, st.text(), st.integers(0, 2**63), st.integers(0, 2**63), st.lists(EVENTS, max_size=4).map(tuple)
)


@given(BATCHES)
def test_decode_inverts_encode(batch):
    assert decode(encode(batch)) == batch


@given(BATCHES, st.data())
def test_garbage_is_a_value_error_and_never_a_crash(batch, data):
    wire = bytearray(encode(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    garbage = data.draw(st.sampled_from([bytes(wire), bytes(wire[: len(wire) // 2]), data.draw(st.binary())]))
    try:
        assert isinstance(decode(garbage), KvEventBatch)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({}, "batch must be list"),
        ([1, "r", 0, 0], "batch must have 5 fields"),
        ([2, "r", 0, 0, []], "version must be 1"),
        ([1, b"r", 0, 0, []], "replica must be str"),
        ([1, "r", -1, 0, []], "epoch must be a non-negative integer"),
        ([1, "r", 0, True, []], "seq must be a non-negative integer"),
        ([1, "r", 0, 0, [["grown"]]], r"events\[0\]: unknown event 'grown'"),
        ([1, "r", 0, 0, [["cleared", 1]]], r"events\[0\] must have 1 fields"),
        ([1, "r", 0, 0, [["removed", b"", "device"]]], r"events\[0\].hashes must be a positive multiple"),
        ([1, "r", 0, 0, [["stored", b"p", b"h" * 16, b"t" * 64, "device"]]], r"events\[0\].parent must be 16 bytes"),
        ([1, "r", 0, 0, [["stored", b"p" * 16, b"h" * 32, b"t" * 68, "device"]]], "68 bytes are not whole blocks"),
    ],
)
def test_errors_name_what_is_wrong(wire, message):
    with pytest.raises(ValueError, match=message):
        decode(msgpack.packb(wire))


def test_deeply_nested_garbage():
    with pytest.raises(ValueError, match="not msgpack"):
        decode(b"\x91" * 100_000)


def test_size_is_bounded_both_ways(monkeypatch):
    monkeypatch.setattr(events, "MAX_BATCH_BYTES", 100)
    with pytest.raises(ValueError, match="exceeds 100"):
        decode(b"\x00" * 101)
    with pytest.raises(ValueError, match="exceeds 100"):
        encode(KvEventBatch("r", 0, 0, (BlocksRemoved((b"h" * 16,) * 7),)))
