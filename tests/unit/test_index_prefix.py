from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch
from warmroot.kv_store.hash_map import HashMap
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.kv_store.index import KEY_BYTES, Applied, PrefixIndex

BLOCK = 2
ROOTS = [namespace_root("m"), namespace_root("m", salt="tenant")]


def stored(root, tokens, start=0, block=BLOCK):
    """The event of a replica that computed ``tokens`` and had ``start`` blocks of them before."""
    hashes = chain(root, tokens, block)
    parent = hashes[start - 1] if start else root
    return BlocksStored(parent, tuple(hashes[start:]), pack_tokens(tokens[start * block : len(hashes) * block]))


class Replica:
    """A model replica: a set of block hashes, and the batches it emits."""

    def __init__(self, name, epoch=1):
        self.name, self.epoch, self.seq = ReplicaId(name), Epoch(epoch), 0

    def batch(self, *events, seq=None):
        batch = KvEventBatch(self.name, self.epoch, self.seq if seq is None else seq, events)
        self.seq = batch.seq + 1
        return batch


def match(index, tokens, root=ROOTS[0], block=BLOCK):
    return index.match(root, pack_tokens(tokens), block)


def check(index):
    """The tree's invariants: compressed, pruned, and in agreement with its side map."""
    seen = 0
    held = defaultdict(int)

    def walk(node, top):
        nonlocal seen
        for first, child in (node.children or {}).items():
            assert child.parent is node
            assert index._nodes[child.number] is child
            assert child.tokens.startswith(first)
            assert len(child.tokens) == len(child.hashes) // KEY_BYTES * child.block_bytes > 0
            assert child.mask or child.children
            only = len(node.children) == 1
            assert top or not only or child.mask != node.mask, "an edge is cut for nothing"
            for at in range(0, len(child.hashes), KEY_BYTES):
                assert index._where.get(child.hashes[at : at + KEY_BYTES]) == child.number
                seen += 1
                for bit in range(child.mask.bit_length()):
                    held[bit] += child.mask >> bit & 1
            walk(child, False)

    for root in index.roots.values():
        assert root.children
        walk(root, True)
    assert seen == index.num_blocks == len(index._where)
    for name, replica in index._replicas.items():
        assert index.blocks_of(name) == held[replica.bit.bit_length() - 1]


def test_matches_whole_blocks_of_every_holder():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    assert index.apply(a.batch(stored(ROOTS[0], [1, 2, 3, 4, 5, 6]))) is Applied.APPLIED
    index.apply(b.batch(stored(ROOTS[0], [1, 2, 3, 4, 9, 9])))
    assert match(index, [1, 2, 3, 4, 5, 6, 7]) == {"a": 6, "b": 4}
    assert match(index, [1, 2, 3, 4, 9, 9]) == {"a": 4, "b": 6}
    assert match(index, [1, 2, 3]) == {"a": 2, "b": 2}
    assert match(index, [1]) == {}
    assert match(index, []) == {}
    assert match(index, [2, 1]) == {}
    check(index)


def test_namespaces_never_meet():
    index, a = PrefixIndex(), Replica("a")
    index.apply(a.batch(stored(ROOTS[0], [1, 2])))
    assert match(index, [1, 2], ROOTS[1]) == {}
    index.apply(a.batch(stored(ROOTS[1], [1, 2, 3, 4])))
    assert match(index, [1, 2, 3, 4], ROOTS[0]) == {"a": 2}
    assert match(index, [1, 2, 3, 4], ROOTS[1]) == {"a": 4}


def test_block_sizes_never_meet():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    index.apply(a.batch(stored(ROOTS[0], [1, 2, 3, 4], block=2)))
    index.apply(b.batch(stored(ROOTS[0], [1, 2, 3, 4], block=4)))
    assert match(index, [1, 2, 3, 4], block=2) == {"a": 4}
    assert match(index, [1, 2, 3, 4], block=4) == {"b": 4}


def test_generated_blocks_extend_the_edge():
    index, a = PrefixIndex(), Replica("a")
    tokens = [1, 2]
    index.apply(a.batch(stored(ROOTS[0], tokens)))
    for n in range(10):
        tokens += [n, n]
        index.apply(a.batch(stored(ROOTS[0], tokens, start=n + 1)))
    assert match(index, tokens) == {"a": 22}
    assert len([node for node in index._nodes if node]) == 1


def test_removal_from_the_leaf_up_leaves_nothing_behind():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    tokens = list(range(20))
    hashes = chain(ROOTS[0], tokens, BLOCK)
    for replica in (a, b):
        index.apply(replica.batch(stored(ROOTS[0], tokens)))
    for left in reversed(range(10)):
        index.apply(a.batch(BlocksRemoved((hashes[left],))))
        assert match(index, tokens) == ({"a": left * 2, "b": 20} if left else {"b": 20})
        check(index)
    index.apply(b.batch(BlocksRemoved(tuple(reversed(hashes)))))
    assert (index.num_blocks, index.roots) == (0, {})


def test_a_hole_ends_the_match():
    index, a = PrefixIndex(), Replica("a")
    tokens = list(range(10))
    hashes = chain(ROOTS[0], tokens, BLOCK)
    index.apply(a.batch(stored(ROOTS[0], tokens)))
    index.apply(a.batch(BlocksRemoved((hashes[2],))))
    assert match(index, tokens) == {"a": 4}
    index.apply(a.batch(stored(ROOTS[0], tokens[:6], start=2)))
    assert match(index, tokens) == {"a": 10}
    check(index)


def test_a_gap_is_flagged_until_a_snapshot_comes():
    index, a = PrefixIndex(), Replica("a")
    index.apply(a.batch(stored(ROOTS[0], [1, 2])))
    assert index.apply(a.batch(stored(ROOTS[0], [3, 4]), seq=2)) is Applied.GAP
    assert index.apply(a.batch(stored(ROOTS[0], [5, 6]), seq=3)) is Applied.GAP
    assert match(index, [3, 4]) == {}
    snapshot = (CacheCleared(), stored(ROOTS[0], [3, 4]), stored(ROOTS[0], [5, 6]))
    assert index.apply(a.batch(*snapshot, seq=3)) is Applied.APPLIED
    assert match(index, [1, 2]) == {}
    assert match(index, [5, 6]) == {"a": 2}
    assert index.apply(a.batch(stored(ROOTS[0], [7, 8]))) is Applied.APPLIED


def test_a_snapshot_the_reader_has_passed_is_stale():
    index, a = PrefixIndex(), Replica("a")
    index.apply(a.batch(stored(ROOTS[0], [1, 2])))
    assert index.apply(a.batch(CacheCleared(), seq=0)) is Applied.STALE
    assert index.apply(a.batch(stored(ROOTS[0], [1, 2]), seq=0)) is Applied.STALE
    assert match(index, [1, 2]) == {"a": 2}


def test_a_stream_joined_late_needs_a_snapshot():
    index, a = PrefixIndex(), Replica("a")
    assert index.apply(a.batch(stored(ROOTS[0], [1, 2]), seq=7)) is Applied.GAP
    assert index.apply(a.batch(CacheCleared(), stored(ROOTS[0], [1, 2]), seq=7)) is Applied.APPLIED
    assert match(index, [1, 2]) == {"a": 2}


def test_a_new_epoch_forgets_the_old_and_silences_it():
    index, old, new = PrefixIndex(), Replica("a", 1), Replica("a", 2)
    index.apply(old.batch(stored(ROOTS[0], [1, 2])))
    index.apply(new.batch(stored(ROOTS[0], [3, 4])))
    assert index.apply(old.batch(stored(ROOTS[0], [5, 6]))) is Applied.STALE
    assert [match(index, tokens) for tokens in ([1, 2], [3, 4], [5, 6])] == [{}, {"a": 2}, {}]
    check(index)


def test_drop_forgets_one_replica_and_its_place_is_reused():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    index.apply(a.batch(stored(ROOTS[0], [1, 2, 3, 4])))
    index.apply(b.batch(stored(ROOTS[0], [1, 2])))
    index.drop(ReplicaId("a"))
    index.drop(ReplicaId("nobody"))
    assert match(index, [1, 2, 3, 4]) == {"b": 2}
    index.apply(Replica("c").batch(stored(ROOTS[0], [7, 7])))
    assert match(index, [1, 2]) == {"b": 2}
    assert index._replicas["c"].bit == 1
    check(index)


def test_other_tiers_are_not_counted():
    index, a = PrefixIndex(), Replica("a")
    event = stored(ROOTS[0], [1, 2])
    index.apply(a.batch(BlocksStored(event.parent, event.hashes, event.token_ids, "host")))
    assert match(index, [1, 2]) == {}


def test_a_hash_that_contradicts_the_tokens_does_no_harm():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    index.apply(a.batch(stored(ROOTS[0], [1, 2, 3, 4])))
    index.apply(b.batch(BlocksStored(ROOTS[0], (BlockHash(b"x" * 16),), pack_tokens([1, 2]))))
    index.apply(b.batch(BlocksRemoved((BlockHash(b"y" * 16),))))
    assert match(index, [1, 2, 3, 4]) == {"a": 4}
    check(index)


token = st.integers(0, 1)
prompts = st.lists(token, min_size=1, max_size=14)
actions = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "evict", "hole", "clear", "drop"]),
        st.integers(0, 2),
        st.integers(0, 1),
        prompts,
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=250, deadline=None)
@given(actions, prompts)
def test_agrees_with_a_naive_model(script, question):
    index = PrefixIndex()
    replicas = [Replica(name) for name in "abc"]
    held = [set() for _ in replicas]
    for action, who, where, tokens, amount in script:
        replica, mine, root = replicas[who], held[who], ROOTS[where]
        hashes = chain(root, tokens, BLOCK)
        if action == "store" and hashes:
            known = 0
            while known < len(hashes) and hashes[known] in mine:
                known += 1
            start = min(known, amount, len(hashes) - 1)
            index.apply(replica.batch(stored(root, tokens, start)))
            mine.update(hashes[start:])
        elif action in ("evict", "hole"):
            gone = hashes[amount:][::-1] if action == "evict" else hashes[amount : amount + 1]
            if gone:
                index.apply(replica.batch(BlocksRemoved(tuple(gone))))
            mine.difference_update(gone)
        elif action == "clear":
            index.apply(replica.batch(CacheCleared()))
            mine.clear()
        elif action == "drop":
            index.drop(replica.name)
            mine.clear()
            replica.seq = 0
        check(index)
    for root in ROOTS:
        expected = {}
        for replica, mine in zip(replicas, held, strict=True):
            hashes = chain(root, question, BLOCK)
            count = next((n for n, key in enumerate(hashes) if key not in mine), len(hashes))
            if count:
                expected[replica.name] = count * BLOCK
        assert match(index, question, root) == expected


def test_hash_map_agrees_with_a_dict_while_it_grows_and_shrinks():
    import random

    rng = random.Random(0)
    ours, theirs = HashMap(), {}
    for step in range(40_000):
        key = rng.randrange(12_000).to_bytes(4, "little")[:2] * 2 + rng.randrange(4).to_bytes(4, "big")
        if rng.random() < (0.7 if step < 20_000 else 0.3):
            ours.put(key, step)
            theirs[key] = step
        else:
            ours.pop(key)
            theirs.pop(key, None)
    assert len(ours) == len(theirs)
    assert all(ours.get(key) == number for key, number in theirs.items())
    assert ours.get(b"\xff" * 8) is None


def test_equal_tokens_with_another_hash_are_counted_and_left_out():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    index.apply(a.batch(stored(ROOTS[0], [1, 2, 3, 4])))
    fake = BlocksStored(ROOTS[0], (BlockHash(b"x" * 16), BlockHash(b"y" * 16)), pack_tokens([1, 2, 3, 4]))
    index.apply(b.batch(fake))
    assert match(index, [1, 2, 3, 4]) == {"a": 4}
    assert (index.conflicts_of("a"), index.conflicts_of("b"), index.blocks_of("b")) == (0, 1, 0)
    check(index)


def test_a_hash_with_other_tokens_takes_nothing_from_who_had_it():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    tokens = [1, 2, 3, 4, 5, 6]
    hashes = chain(ROOTS[0], tokens, BLOCK)
    index.apply(a.batch(stored(ROOTS[0], tokens)))
    own = chain(ROOTS[0], [9, 9], BLOCK)[0]
    index.apply(b.batch(BlocksStored(ROOTS[0], (own, hashes[1], hashes[2]), pack_tokens([9, 9, 8, 8, 7, 7]))))
    check(index)
    assert (index.conflicts_of("b"), index.blocks_of("b")) == (1, 1)
    assert match(index, [9, 9, 8, 8]) == {"b": 2}
    index.apply(b.batch(BlocksRemoved((hashes[1],))))
    assert match(index, tokens) == {"a": 6}
    index.apply(a.batch(BlocksRemoved((hashes[2], hashes[1]))))
    assert match(index, tokens) == {"a": 2}
    check(index)


def test_a_run_that_names_a_block_twice_ends_there():
    index, a = PrefixIndex(), Replica("a")
    one, two = chain(ROOTS[0], [1, 2, 3, 4], BLOCK)
    index.apply(a.batch(BlocksStored(ROOTS[0], (one, two, one), pack_tokens([1, 2, 3, 4, 5, 6]))))
    assert (match(index, [1, 2, 3, 4, 5, 6]), index.conflicts_of("a")) == ({"a": 4}, 1)
    check(index)
    index.apply(a.batch(BlocksStored(two, (one,), pack_tokens([7, 7]))))
    assert index.conflicts_of("a") == 2
    check(index)


def test_blocks_of_another_size_cannot_follow():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    index.apply(a.batch(stored(ROOTS[0], [1, 2, 3, 4])))
    parent = chain(ROOTS[0], [1, 2, 3, 4], BLOCK)[1]
    for replica in (a, b):
        index.apply(replica.batch(BlocksStored(parent, (BlockHash(b"z" * 16),), pack_tokens([5, 6, 7]))))
    assert (index.num_blocks, index.conflicts_of("a"), index.conflicts_of("b")) == (2, 1, 1)
    check(index)


def test_a_stranger_whose_hashes_are_all_known_leaves_no_root_behind():
    index, a, b = PrefixIndex(), Replica("a"), Replica("b")
    index.apply(a.batch(stored(ROOTS[0], [1, 2])))
    index.apply(b.batch(BlocksStored(ROOTS[1], tuple(chain(ROOTS[0], [1, 2], BLOCK)), pack_tokens([8, 8]))))
    assert (len(index.roots), index.conflicts_of("b")) == (1, 1)
    check(index)


hashes_of_few = st.lists(st.integers(0, 5).map(lambda n: BlockHash(bytes([n]) * 16)), min_size=1, max_size=4)
poison = st.one_of(
    st.builds(
        lambda parent, hashes, tokens, size: BlocksStored(
            parent, tuple(hashes), pack_tokens((tokens * 8)[: len(hashes) * size])
        ),
        st.sampled_from(ROOTS) | st.integers(0, 5).map(lambda n: BlockHash(bytes([n]) * 16)),
        hashes_of_few,
        st.lists(st.integers(0, 1), min_size=1, max_size=4),
        st.integers(1, 2),
    ),
    st.builds(lambda hashes: BlocksRemoved(tuple(hashes)), hashes_of_few),
    st.just(CacheCleared()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), poison), max_size=25))
def test_no_nonsense_breaks_the_tree(script):
    index, replicas = PrefixIndex(), [Replica(name) for name in "abc"]
    for who, event in script:
        assert index.apply(replicas[who].batch(event)) is Applied.APPLIED
        check(index)
    for replica in replicas:
        index.drop(replica.name)
    assert (index.num_blocks, index.roots, index.slots.names) == (0, {}, [None] * len(index.slots.names))


def test_a_fork_of_which_nobody_is_left_goes_whole():
    """One branch is pruned, which joins the stem with the other: that must go, too, though it was looked at before."""
    index, a, b = PrefixIndex(), Replica("a"), Replica("b", 1)
    index.apply(a.batch(stored(ROOTS[0], [0, 0])))
    index.apply(b.batch(stored(ROOTS[0], [1, 0, 0, 1, 0, 0, 0, 0])))
    index.drop(a.name)  # the stem gets its number, the first
    index.apply(b.batch(stored(ROOTS[0], [1, 0, 0, 1, 0, 1])))
    index.apply(Replica("b", 2).batch(stored(ROOTS[0], [2, 2])))
    check(index)
    assert index.num_blocks == 1


incarnations = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3), prompts, st.booleans()), max_size=30)


@settings(max_examples=150, deadline=None)
@given(incarnations, prompts)
def test_epochs_that_come_interleaved_leave_only_the_newest(script, question):
    index, hashes = PrefixIndex(), chain(ROOTS[0], question, BLOCK)
    speakers = {(name, epoch): Replica(name, epoch) for name in "ab" for epoch in (1, 2, 3)}
    newest, held = {}, {}
    for who, epoch, tokens, whole in script:
        name, blocks = "ab"[who], chain(ROOTS[0], tokens, BLOCK)
        events = ([CacheCleared()] if whole else []) + ([stored(ROOTS[0], tokens)] if blocks else [])
        applied = index.apply(speakers[name, epoch].batch(*events))
        if epoch < newest.get(name, 0):
            assert applied is Applied.STALE
            continue
        if whole or epoch > newest.get(name, 0):
            held[name] = set()
        newest[name] = epoch
        held[name].update(blocks)
        check(index)
    count = {
        name: next((n for n, key in enumerate(hashes) if key not in mine), len(hashes)) for name, mine in held.items()
    }
    assert match(index, question) == {name: n * BLOCK for name, n in count.items() if n}
