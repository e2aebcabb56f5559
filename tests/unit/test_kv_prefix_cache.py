"""Pages, tree and events together, block size 4. Token strings are lists here."""

from array import array

import pytest

from warmroot.cluster.kv_layout import KvLayout
from warmroot.kv_store import prefix_cache
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, CacheCleared
from warmroot.kv_store.hashing import chain, namespace_root, pack_tokens
from warmroot.kv_store.prefix_cache import PrefixCache

ROOT = namespace_root("m")


def make(num_blocks=32, windows=(None,), **options):
    return PrefixCache(KvLayout.of(windows, 4), num_blocks, **options)


def start(cache, tokens, root=ROOT):
    """What the engine does for a request that computes all its tokens in one step."""
    match = cache.match(root, pack_tokens(tokens), len(tokens) - 1)
    lease = cache.acquire(root, match)
    assert cache.grow(lease, len(tokens))
    cache.copied(lease)
    cache.commit(lease, array("i", tokens), len(tokens))
    cache.slide(lease, len(tokens))
    return match, lease


def run(cache, tokens, root=ROOT):
    match, lease = start(cache, tokens, root)
    cache.release(lease)
    return match


def usable(cache, tokens, root=ROOT):
    match = cache.match(root, pack_tokens(tokens), len(tokens) - 1)
    return match.num_tokens, match.num_partial


def test_whole_blocks_match_and_the_last_token_is_always_left():
    cache = make()
    assert run(cache, list(range(12))).num_tokens == 0
    assert usable(cache, [*range(12), 50]) == (12, 0)
    assert usable(cache, [*range(8), 50, 51]) == (8, 0)
    # All 12 are cached, but the last must run: 3 tokens of its block can be copied.
    assert usable(cache, list(range(12))) == (8, 3)


def test_namespaces_do_not_share():
    cache = make()
    run(cache, list(range(12)))
    assert usable(cache, list(range(12)), namespace_root("m", salt="other")) == (0, 0)


def test_the_child_with_most_common_tokens_is_copied():
    cache = make(min_partial=2)
    run(cache, [0, 1, 2, 3, 10, 11, 0, 0])
    run(cache, [0, 1, 2, 3, 10, 11, 12, 0])
    match, lease = start(cache, [0, 1, 2, 3, 10, 11, 12, 13, 14])
    assert (match.num_tokens, match.num_partial) == (4, 3)
    assert match.partial.tokens == pack_tokens([10, 11, 12, 0])
    cache.release(lease)
    assert usable(cache, [0, 1, 2, 3, 10, 99, 99, 99, 99]) == (4, 0)


def test_the_source_of_a_copy_is_held_until_the_step_ran():
    cache = make(num_blocks=4)
    run(cache, [0, 1, 2, 3])
    lease = cache.acquire(ROOT, cache.match(ROOT, pack_tokens([0, 1, 2, 9, 9]), 4))
    ((source, destination),) = lease.copies
    assert lease.tables == ([destination],) and cache.pool.holders(source) == 1
    assert not cache.grow(lease, 12)  # would need the source's page
    cache.copied(lease)
    assert cache.pool.holders(source) == 0 and cache.grow(lease, 12)


def test_release_is_idempotent():
    cache = make()
    _, lease = start(cache, list(range(10)))
    cache.release(lease)
    cache.release(lease)
    assert cache.pool.num_used == 0 and cache.num_cached == 2 and cache.num_available == 31


def test_the_request_that_computed_a_block_again_gives_its_page_to_the_tree_or_keeps_it():
    cache = make()
    tokens = array("i", range(8))
    empty = cache.match(ROOT, b"", 0)
    first, second = cache.acquire(ROOT, empty), cache.acquire(ROOT, empty)
    for lease in (first, second):
        assert cache.grow(lease, 8)
        cache.commit(lease, tokens, 8)
    assert second.cursor is first.cursor and set(first.cursor.pages) <= set(first.tables[0])
    cache.release(first)
    third = cache.acquire(ROOT, empty)
    assert cache.grow(third, 8)
    cache.commit(third, tokens, 8)
    assert third.cursor.pages[0] == third.tables[0][1]  # nobody held the old page: it was freed
    cache.release(second)
    cache.release(third)
    assert cache.num_cached == 2 and cache.pool.num_free == 29


def test_eviction_takes_cold_leaves_first_and_spares_what_was_hit():
    cache = make(num_blocks=9)
    run(cache, [1] * 8)
    run(cache, [2] * 8)
    run(cache, [3] * 8)
    run(cache, [*[1] * 8, 7])  # a hit warms the oldest
    run(cache, [4] * 12)
    assert usable(cache, [*[1] * 8, 0]) == (8, 0)
    assert usable(cache, [*[2] * 8, 0]) == (4, 0)  # the tail went first
    run(cache, [5] * 8)
    assert usable(cache, [*[2] * 8, 0]) == (0, 0)
    assert usable(cache, [*[1] * 8, 0]) == (8, 0)


def test_a_shared_prefix_is_as_warm_as_what_grew_on_it():
    cache = make(num_blocks=12)
    for branch in range(3):
        run(cache, [*[1] * 8, *[10 + branch] * 4])
    for other in range(20, 40):
        run(cache, [other] * 8)
        if usable(cache, [*[1] * 8, 10, 10, 10, 10, 0])[0] == 0:
            break
    assert other > 22  # one scan of the pool's size did not push it out
    assert other < 39  # but it is not there for ever


def test_what_requests_hold_is_never_evicted_and_nothing_is_evicted_in_vain():
    cache = make(num_blocks=9)
    _, lease = start(cache, [1] * 16)
    run(cache, [2] * 8)
    cache.drain_events()
    other = cache.acquire(ROOT, cache.match(ROOT, b"", 0))
    assert not cache.grow(other, 20) and cache.drain_events() == []
    assert cache.grow(other, 16)
    cache.release(other)
    cache.release(lease)
    assert usable(cache, [*[1] * 16, 0]) == (16, 0)


def test_a_window_needs_its_last_pages_only():
    cache = make(windows=(6, None))
    sliding, full = 0, 1
    _, lease = start(cache, list(range(20)))
    # The query at 20 sees 15 … 20: blocks 3 and 4.
    assert [bool(page) for page in lease.tables[sliding]] == [False] * 3 + [True] * 2
    assert all(lease.tables[full])
    assert cache.pool.num_used == 7 and cache.num_cached == 3
    cache.release(lease)
    match = cache.match(ROOT, pack_tokens([*range(12), 99]), 12)
    held = cache.acquire(ROOT, match)
    assert match.num_tokens == 12 and [bool(page) for page in held.tables[sliding]] == [False, True, True]
    cache.release(held)


def test_pages_out_of_a_window_go_before_blocks_do_and_limit_what_matches():
    cache = make(num_blocks=11, windows=(6, None))
    _, lease = start(cache, list(range(20)))
    other = cache.acquire(ROOT, cache.match(ROOT, b"", 0))
    assert cache.pool.num_free == 0 and cache.grow(other, 4)  # two of the three pages that slid out
    cache.release(lease)
    assert usable(cache, [*range(20), 99]) == (20, 0)
    assert usable(cache, [*range(12), 99]) == (0, 0)
    cache.release(other)


def test_a_block_computed_again_heals_a_missing_page():
    cache = make(num_blocks=11, windows=(6, None))
    run(cache, list(range(20)))
    filler = cache.acquire(ROOT, cache.match(ROOT, b"", 0))
    assert cache.grow(filler, 4)
    cache.release(filler)
    again = cache.acquire(ROOT, cache.match(ROOT, b"", 0))
    assert cache.grow(again, 8)
    cache.commit(again, array("i", range(8)), 8)
    assert all(again.cursor.pages)
    cache.release(again)
    assert usable(cache, [*range(8), 99]) == (8, 0)


def test_events_follow_the_chain_of_hashes():
    cache = make(num_blocks=4)
    run(cache, list(range(12)))
    run(cache, [9] * 4)
    hashes = chain(ROOT, range(12), 4)
    other = chain(ROOT, [9] * 4, 4)
    assert cache.drain_events() == [
        BlocksStored(ROOT, tuple(hashes), pack_tokens(range(12))),
        BlocksRemoved((hashes[2],)),
        BlocksStored(ROOT, tuple(other), pack_tokens([9] * 4)),
    ]
    assert cache.drain_events() == []
    assert {event.hashes for event in cache.snapshot_events()} == {tuple(hashes[:2]), tuple(other)}
    cache.clear()
    assert cache.drain_events() == [CacheCleared()] and cache.snapshot_events() == []
    assert cache.pool.num_free == 3


def test_a_snapshot_lists_warm_chains_first_and_parents_before_children():
    cache = make()
    run(cache, [*[1] * 8, *[2] * 4])
    run(cache, [*[1] * 8, *[3] * 4])
    run(cache, [*[1] * 8, *[3] * 4, 0])
    first, second = cache.snapshot_events()
    assert first.hashes == tuple(chain(ROOT, [*[1] * 8, *[3] * 4], 4))
    assert second.parent == first.hashes[1] and len(second.hashes) == 1


def test_undrained_events_become_a_snapshot(monkeypatch):
    monkeypatch.setattr(prefix_cache, "MAX_PENDING_EVENTS", 2)
    cache = make()
    for token in range(5):
        run(cache, [token] * 4)
    cleared, *stored = cache.drain_events()
    assert cleared == CacheCleared() and len(stored) == 5
    run(cache, [9] * 4)
    assert len(cache.drain_events()) == 1


def test_a_request_that_outlives_a_clear_keeps_its_pages_and_caches_no_more():
    cache = make()
    tokens = array("i", range(8))
    _, lease = start(cache, list(tokens))
    cache.clear()
    assert cache.pool.num_used == 2
    assert cache.grow(lease, 12)
    cache.commit(lease, array("i", range(12)), 12)
    assert usable(cache, [*range(12), 0]) == (0, 0) and lease.cursor is None
    cache.release(lease)
    assert cache.pool.num_free == 31


def test_without_caching_it_only_hands_out_pages():
    cache = make(enabled=False)
    assert run(cache, list(range(12))).num_tokens == run(cache, list(range(12))).num_tokens == 0
    assert cache.num_cached == 0 and cache.drain_events() == []


@pytest.mark.parametrize(
    ("windows", "tokens"),
    [((None,), 124), ((None, None), 124), ((8, None), 112), ((8,), 2**31)],
)
def test_longest_sequence(windows, tokens):
    # A window of 8 takes at most 3 of the 31 pages; (None, None) is one group whose pages hold both layers.
    assert make(windows=windows).max_tokens() == tokens


def test_empty_namespaces_are_forgotten():
    cache = make(num_blocks=3)
    for tenant in range(100):
        run(cache, [1, 2, 3, 4, 5], namespace_root("m", salt=str(tenant)))
    assert len(cache.tree._roots) <= 2
