import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.kv_store.slots import ReplicaSlots, slots_of
from warmroot.router.cached_columns import CachedColumns

NAMES = [f"r{n}" for n in range(70)]


def test_slots_are_used_again_and_masks_name_their_replicas():
    slots = ReplicaSlots()
    assert [slots.take(name) for name in "abc"] == [0, 1, 2]
    slots.free(1)
    assert slots.take("d") == 1
    assert slots.by_name([(0b111, 16), (0b010, 32)]) == {"a": 16, "d": 32, "c": 16}
    slots.free(0)
    assert slots.by_name([(0b011, 16)]) == {"d": 16}
    assert slots_of(1 << 999 | 5) == [0, 2, 999]


def test_columns_follow_those_who_come_and_go():
    slots = ReplicaSlots()
    for name in "ab":
        slots.take(name)
    columns = CachedColumns(slots)

    def row(names, version):
        row = np.zeros(len(names))
        columns.write([(0b11, 16), (0b10, 32)], row, names, version)
        return row.tolist()

    assert row(["b", "x", "a"], 1) == [32, 0, 16]
    assert row(["a"], 2) == [16]
    slots.free(0)
    slots.take("x")
    assert row(["a"], 2) == [0]
    assert row(["x", "b"], 3) == [16, 32]
    assert row([], 4) == []


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(NAMES), unique=True),
    st.permutations(NAMES),
    st.lists(st.tuples(st.sets(st.integers(0, 69), min_size=1), st.integers(1, 99)), max_size=6),
)
def test_columns_are_the_most_that_any_set_says(known, fleet, held):
    slots = ReplicaSlots()
    for name in known:
        slots.take(name)
    sets = [({slot for slot in chosen if slot < len(known)}, tokens) for chosen, tokens in held]
    sets = [(chosen, tokens) for chosen, tokens in sets if chosen]
    row = np.zeros(len(fleet))
    masks = [(sum(1 << slot for slot in chosen), tokens) for chosen, tokens in sets]
    columns = CachedColumns(slots)
    for _ in range(2):
        columns.write(masks, row, fleet, 1)
        for name, value in zip(fleet, row, strict=True):
            slot = known.index(name) if name in known else -1
            assert value == max((tokens for chosen, tokens in sets if slot in chosen), default=0)
