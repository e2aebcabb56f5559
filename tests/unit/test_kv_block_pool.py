import pytest

from warmroot.kv_store.block_pool import BlockPool, InvariantError


def test_page_zero_is_never_handed_out():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3] and pool.num_free == 0
    with pytest.raises(InvariantError):
        pool.allocate(1)


def test_a_page_is_free_when_its_last_holder_goes():
    pool = BlockPool(3)
    (page,) = pool.allocate(1)
    pool.share(page)
    pool.release(page)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.release(page)
    assert (pool.num_used, pool.num_free) == (0, 2)
    with pytest.raises(InvariantError):
        pool.release(page)
    with pytest.raises(InvariantError):
        pool.share(page)


def test_a_kept_page_is_idle_until_shared_or_dropped():
    pool = BlockPool(3)
    (page,) = pool.allocate(1)
    pool.keep(page)
    pool.release(page)
    assert (pool.num_used, pool.num_idle, pool.num_free) == (0, 1, 1)
    pool.share(page)
    assert (pool.num_used, pool.num_idle) == (1, 0)
    pool.drop(page)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.release(page)
    pool.check([], [])
    assert pool.num_free == 2


def test_misuse_is_an_invariant_error():
    pool = BlockPool(3)
    (page,) = pool.allocate(1)
    pool.keep(page)
    with pytest.raises(InvariantError):
        pool.keep(page)
    with pytest.raises(InvariantError):
        pool.drop(2)
    with pytest.raises(InvariantError):
        pool.release(0)
    with pytest.raises(InvariantError):
        pool.check([page], [])
    with pytest.raises(ValueError, match="null page"):
        BlockPool(1)
