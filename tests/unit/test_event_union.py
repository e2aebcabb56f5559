"""Events of several caches as those of their union."""

from warmroot.actors.engine.event_union import EventUnion
from warmroot.cluster.ids import BlockHash
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, CacheCleared


def block(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def stored(parent: int, *numbers: int, tier: str = "device") -> BlocksStored:
    return BlocksStored(block(parent), tuple(map(block, numbers)), b"".join(bytes([n]) * 8 for n in numbers), tier)


def removed(*numbers: int, tier: str = "device") -> BlocksRemoved:
    return BlocksRemoved(tuple(map(block, numbers)), tier)


def test_the_first_stores_and_the_last_removes():
    union = EventUnion(2)
    assert union.merge(0, [stored(0, 1, 2)]) == [stored(0, 1, 2)]
    assert union.merge(1, [stored(0, 1, 2, 3), stored(1, 4)]) == [stored(2, 3), stored(1, 4)]
    assert union.merge(0, [removed(2, 1)]) == []
    assert union.merge(1, [removed(3, 2)]) == [removed(3, 2)]
    assert union.merge(0, [stored(0, 1)]) == []
    assert union.merge(1, [removed(4, 1)]) == [removed(4)]


def test_what_a_cache_says_twice_counts_once():
    union = EventUnion(2)
    union.merge(0, [stored(0, 1), stored(0, 1)])
    assert union.merge(0, [removed(1), removed(1), removed(7)]) == [removed(1)]


def test_a_clear_removes_what_nobody_else_has_children_first():
    union = EventUnion(2)
    union.merge(0, [stored(0, 1, 2), stored(1, 3)])
    union.merge(1, [stored(0, 1)])
    assert union.merge(0, [CacheCleared(), stored(0, 1)]) == [removed(3, 2)]
    union.merge(0, [removed(1)])
    assert union.merge(1, [CacheCleared(), stored(0, 5)]) == [CacheCleared(), stored(0, 5)]


def test_tiers_count_apart():
    union = EventUnion(2)
    union.merge(0, [stored(0, 1)])
    assert union.merge(1, [stored(0, 1, tier="host")]) == [stored(0, 1, tier="host")]
    assert union.merge(0, [removed(1)]) == [removed(1)]
    union.merge(0, [stored(0, 2), stored(0, 1, 3, tier="host")])
    assert union.merge(0, [CacheCleared()]) == [removed(3, tier="host"), removed(2)]
