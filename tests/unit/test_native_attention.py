"""The native attention kernels of every instruction set that this machine runs, against the naive reference."""

import ctypes
import itertools
import random
from dataclasses import replace

import pytest
import torch
from attention_harness import CASES, Case, make_batch, naive

from warmroot.actors.attention.native_backend import NativeAttention
from warmroot.actors.kernels import library as kernels
from warmroot.cluster.errors import ConfigError

ORDER = ("generic", "avx2", "avx512")
SCALE = 0.2


def runnable():
    """Libraries for this machine, the plainest first."""
    path = kernels._path("generic")
    if path is None:
        return []
    ask = ctypes.CDLL(path).wr_best_instructions
    ask.restype = ctypes.c_char_p
    names = ORDER[: ORDER.index(ask().decode()) + 1]
    return [kernels.NativeLibrary(name, kernels._path(name)) for name in names if kernels._path(name)]


LIBRARIES = {library.name: library for library in runnable()}
pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the native kernels were not built")


@pytest.fixture(params=ORDER)
def library(request):
    if request.param not in LIBRARIES:
        pytest.skip(f"no {request.param} here")
    library = LIBRARIES[request.param]
    before = library.num_threads
    library.set_num_threads(2)
    yield library
    library.set_num_threads(before)


def native_pages(batch):
    """The batch's pages in the shapes of the native backend."""
    return batch.k_cache.permute(0, 2, 3, 1).contiguous(), batch.v_cache.permute(0, 2, 1, 3).contiguous()


def attend(backend, case, batch, metadata=None):
    return backend.forward(
        batch.query,
        *native_pages(batch),
        metadata or batch.metadata,
        scale=SCALE,
        window=case.window,
        softcap=case.softcap,
    )


def check(library, case, dtype=torch.float32):
    batch = make_batch(case, dtype=dtype, garbage=float("inf"))
    batch.query = batch.query.float()
    torch.testing.assert_close(
        attend(NativeAttention(library), case, batch), naive(case, batch, SCALE), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_naive(library, case):
    check(library, case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["decodes of odd lengths", "mixed", "window, chunk", "softcap, window, mixed"])
def test_half_precision_pages(library, name, dtype):
    check(library, CASES[name], dtype)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 136, 256])
def test_head_sizes(library, head_dim):
    check(library, Case((1, 9, 30), (90, 40, 30), heads=(6, 2), head_dim=head_dim), torch.float16)


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 48, 64, 256])
def test_block_sizes(library, block_size):
    check(library, Case((1, 9, 60), (300, 140, 60), block_size=block_size, window=100), torch.float16)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 13, 50])
def test_heads_per_kv_head(library, group):
    check(library, Case((1, 7, 1), (70, 40, 3), heads=(2 * group, 2), head_dim=16))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(library, seed):
    draw = random.Random(seed)
    keys = [draw.choice((1, 15, 16, 17, 64, 65, 200, 256, 257, 600)) for _ in range(draw.randint(1, 6))]
    case = Case(
        queries=tuple(min(length, draw.choice((1, 1, 1, 3, 17, 70))) for length in keys),
        keys=tuple(keys),
        heads=draw.choice(((3, 3), (6, 2), (8, 1))),
        window=draw.choice((None, None, 1, 40, 300)),
        softcap=draw.choice((None, 2.0)),
        block_size=draw.choice((5, 16, 32)),
    )
    check(library, case, draw.choice((torch.float32, torch.float16)))


def test_a_batch_without_queries(library):
    batch = make_batch(Case((1, 1), (20, 3)))
    empty = replace(batch.metadata, cu_seqlens_q=torch.zeros(3, dtype=torch.int32))
    batch.query = batch.query[:0]
    assert attend(NativeAttention(library), Case((), ()), batch, empty).shape == (0, 4, 32)


def shared_prefix(lengths, shared, **options):
    """Decodes whose tables begin with the same ``shared[i]`` blocks, or (second result) with copies of them."""
    batch = make_batch(Case((1,) * len(lengths), lengths, heads=(9, 3), **options))
    table = batch.metadata.block_table
    together = table.clone()
    for row, size in enumerate(shared):
        for cache in (batch.k_cache, batch.v_cache):
            cache[table[row, :size]] = cache[table[0, :size]]
        together[row, :size] = table[0, :size]
    return batch, replace(batch.metadata, block_table=together)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_shared_prefix_gives_the_same_bits(library, softcap):
    lengths = (900, 640, 257, 300, 769, 40, 800)
    batch, together = shared_prefix(lengths, (56, 40, 16, 5, 33, 2, 48))
    case, backend = Case((), (), softcap=softcap), NativeAttention(library)
    assert torch.equal(attend(backend, case, batch, together), attend(backend, case, batch))


def test_many_behind_one_prefix(library):
    """More rows than an item holds."""
    batch, together = shared_prefix((520,) * 20, (32,) * 20)
    backend = NativeAttention(library)
    assert torch.equal(attend(backend, Case((), ()), batch, together), attend(backend, Case((), ()), batch))


def test_results_do_not_depend_on_threads_or_neighbours(library):
    case = Case((1, 1, 5, 70), (900, 33, 400, 300), heads=(6, 2))
    batch, backend = make_batch(case), NativeAttention(library)
    together = attend(backend, case, batch)
    library.set_num_threads(1)
    assert torch.equal(attend(NativeAttention(library), case, batch), together)
    starts = batch.metadata.cu_seqlens_q.tolist()
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        alone = replace(batch)
        alone.query = batch.query[start:end]
        metadata = replace(
            batch.metadata,
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
            seqused_k=batch.metadata.seqused_k[index : index + 1],
            block_table=batch.metadata.block_table[index : index + 1],
        )
        assert torch.equal(attend(backend, case, alone, metadata), together[start:end])


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_query_gives_the_same_bits_however_many_are_asked(library, window, dtype):
    """So what is computed again as a prompt is what was computed token by token."""
    case = Case((600,), (900,), heads=(9, 3), window=window)
    batch, backend = make_batch(case, dtype=dtype), NativeAttention(library)
    batch.query = batch.query.float()
    whole = attend(backend, case, batch)
    for begin, count in ((0, 1), (130, 1), (211, 1), (212, 4), (213, 1), (400, 5), (467, 1), (468, 100), (599, 1)):
        part = replace(batch)
        part.query = batch.query[begin : begin + count]
        metadata = replace(
            batch.metadata,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            seqused_k=torch.tensor([300 + begin + count], dtype=torch.int32),
        )
        assert torch.equal(attend(backend, case, part, metadata), whole[begin : begin + count]), (begin, count)


def test_queries_may_be_a_view_of_a_wider_buffer(library):
    case = CASES["mixed"]
    batch, backend = make_batch(case), NativeAttention(library)
    expected = attend(backend, case, batch)
    wide = torch.randn(batch.query.shape[0], 3, *batch.query.shape[1:]).flatten(1, 2)
    wide[:, : case.heads[0]] = batch.query
    batch.query = wide[:, : case.heads[0]]
    assert torch.equal(attend(backend, case, batch), expected)


def test_plans_of_steps_and_windows_are_kept_apart(library):
    backend = NativeAttention(library)
    cases = [CASES["window over blocks"], CASES["mixed"], Case((1, 1, 1), (20, 61, 300))]
    batches = [make_batch(case) for case in cases]
    for _ in range(2):
        for case, batch in zip(cases, batches, strict=True):
            torch.testing.assert_close(attend(backend, case, batch), naive(case, batch, SCALE), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (5, 24), (1, 8), (64, 40)])
def test_append(library, dtype, block_size, head_dim):
    """Chunks and single tokens, in pages of any order; nothing else is written."""
    backend = NativeAttention(library)
    key_page, value_page = backend.page_shapes(block_size, 3, head_dim)
    num_blocks = 9 + 200 // block_size
    k_pages, v_pages = (torch.full((num_blocks, *page), 7.0).to(dtype) for page in (key_page, value_page))
    slots = torch.cat((torch.arange(3, 150), 150 + torch.randperm(50)[:21])) + block_size
    qkv = torch.randn(len(slots), 12, head_dim)
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    blocks, offsets = slots // block_size, slots % block_size
    expected_k[blocks, :, :, offsets] = qkv[:, 6:9].to(dtype)
    expected_v[blocks, :, offsets] = qkv[:, 9:].to(dtype)
    backend.append(qkv[:, 6:9], qkv[:, 9:], k_pages, v_pages, slots)
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)
    backend.append(qkv[:, 6:9].contiguous(), qkv[:, 9:], k_pages, v_pages, slots)
    assert torch.equal(v_pages, expected_v)


@pytest.mark.skipif(kernels.native() is None, reason="the native kernels are switched off")
def test_operators():
    case = CASES["softcap, window, mixed"]
    batch, backend = make_batch(case), NativeAttention()
    k_pages, v_pages = native_pages(batch)
    plan = backend._plan(batch.metadata, case.window, k_pages, case.heads[0])
    out = torch.ops.warmroot.paged_attention(batch.query, k_pages, v_pages, plan.handle, SCALE, case.softcap)
    assert torch.equal(out, attend(backend, case, batch))
    keys = torch.randn(1, *k_pages.shape[1:3])
    torch.ops.warmroot.kv_append(keys, keys, k_pages, v_pages, torch.tensor([17]))
    assert torch.equal(k_pages[1, :, :, 1], keys[0])
    assert torch.equal(v_pages[1, :, 1], keys[0])


def test_without_kernels_it_says_so(monkeypatch):
    monkeypatch.setattr("warmroot.actors.attention.native_backend.native", lambda: None)
    with pytest.raises(ConfigError, match="native attention"):
        NativeAttention()
