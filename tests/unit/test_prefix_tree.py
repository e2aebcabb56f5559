"""The part of a prefix index that is shown: hot prefixes, the latest blocks, and what is above them."""

import pytest

from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch, SnapshotPart
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens, salted
from warmroot.kv_store.hot_prefixes import HotPrefix
from warmroot.kv_store.index import PrefixIndex
from warmroot.kv_store.prefix_tree import HEAD_TOKENS, LatestBlocks, prefix_tree

BLOCK = 4
ROOT = namespace_root("m")
SYSTEM = list(range(16))


def stored(tokens, root=ROOT):
    """All of a prompt's blocks."""
    return BlocksStored(root, tuple(chain(root, tokens, BLOCK)), pack_tokens(tokens))


class Told:
    """An index and what came last."""

    def __init__(self, most=512):
        self.index, self.latest, self.seqs = PrefixIndex(), LatestBlocks(most), {}

    def __call__(self, replica, *events):
        seq = self.seqs[replica] = self.seqs.get(replica, -1) + 1
        self.index.apply(KvEventBatch(ReplicaId(replica), Epoch(1), seq, events))
        self.latest.note(events)

    def tree(self, limit=100, hot=()):
        return prefix_tree(self.index, self.latest, hot, limit)


@pytest.fixture
def told():
    made = Told()
    made("a", CacheCleared(), stored(SYSTEM))
    made("b", CacheCleared(), stored([*SYSTEM, 100, 101, 102, 103]))
    made("b", stored([*SYSTEM, 200, 201, 202, 203, 204, 205, 206, 207]))
    return made


def test_who_holds_what(told):
    system, first, second = told.tree()
    assert (system.parent, system.depth, system.num_tokens, system.num_children) == (None, 0, 16, 2)
    assert set(system.replicas) == {"a", "b"}
    assert system.namespace == ROOT
    assert system.block_size == BLOCK
    assert [(node.parent, node.depth, node.num_tokens, node.replicas) for node in (first, second)] == [
        (system.id, 16, 4, ("b",)),
        (system.id, 16, 8, ("b",)),
    ]
    assert second.head == pack_tokens(range(200, 208))
    assert len({node.id for node in (system, first, second)}) == 3


def test_ages_follow_what_came_last(told):
    system, first, second = told.tree()
    assert system.age == second.age == 0
    assert first.age > 0
    told("a", stored([*SYSTEM, 100, 101, 102, 103]))
    system, first, second = told.tree()
    assert system.age == first.age == 0
    assert second.age > 0
    assert set(first.replicas) == {"a", "b"}


def test_it_is_bounded_and_the_latest_stay(told):
    for number in range(300, 340):
        told("a", stored([*SYSTEM, *[number] * BLOCK]))
    tree = told.tree(limit=5)
    assert len(tree) == 5
    assert tree[0].num_children == 42
    assert [node.head for node in tree[1:]] == [pack_tokens([number] * BLOCK) for number in range(336, 340)]


def test_what_is_hot_comes_first(told):
    for number in range(300, 340):
        told("a", stored([*SYSTEM, *[number] * BLOCK]))
    hot = HotPrefix(ROOT, BLOCK, pack_tokens([*SYSTEM, 100, 101, 102, 103]), heat=7.0)
    tree = told.tree(limit=3, hot=[hot])
    assert {node.head: node.heat for node in tree} == {
        pack_tokens(SYSTEM): 7.0,
        pack_tokens([100, 101, 102, 103]): 7.0,
        pack_tokens([339] * BLOCK): 0.0,
    }
    # Heat of what nobody holds, or holds no longer, goes nowhere.
    for tokens in ([1, 2, 3, 4], [*SYSTEM, 9, 9, 9, 9], [*SYSTEM[:-1], 99]):
        gone = HotPrefix(ROOT, BLOCK, pack_tokens(tokens), heat=1.0)
        assert all(node.heat == 0.0 for node in told.tree(hot=[gone]))
    ends_within = HotPrefix(ROOT, BLOCK, pack_tokens(SYSTEM[:8]), heat=2.0)
    assert told.tree(hot=[ends_within])[0].heat == 2.0


def test_tenants_have_trees_of_their_own(told):
    private = salted(ROOT, "1:t:")
    told("a", stored(SYSTEM, private))
    roots = {node.namespace: node for node in told.tree() if node.parent is None}
    assert set(roots) == {ROOT, private}
    assert roots[private].replicas == ("a",)
    hot = HotPrefix(ROOT, BLOCK, pack_tokens(SYSTEM), heat=3.0, salt="1:t:")
    heats = {node.namespace: node.heat for node in told.tree(hot=[hot]) if node.parent is None}
    assert heats == {ROOT: 0.0, private: 3.0}


def test_what_is_removed_is_not_shown(told):
    hashes = chain(ROOT, [*SYSTEM, 100, 101, 102, 103], BLOCK)
    told("b", BlocksRemoved((hashes[-1],)))
    assert len(told.tree()) == 2  # the system prompt, and what is left below it


def test_a_long_edge_shows_its_beginning(told):
    told("a", stored(range(1000, 1400)))
    node = next(node for node in told.tree() if node.num_tokens == 400)
    assert node.head == pack_tokens(range(1000, 1000 + HEAD_TOKENS))


def test_a_snapshot_is_older_than_what_was_told():
    told = Told(most=4)
    told("a", CacheCleared(), stored([1] * BLOCK))
    told("b", SnapshotPart(0), *(stored([number] * BLOCK) for number in range(10, 20)))
    heads = {node.head[:4]: node.age for node in told.tree()}
    assert heads == {pack_tokens([number]): age for age, number in enumerate((1, 10, 11, 12))}


def test_nothing_known_is_an_empty_tree():
    assert Told().tree() == []
