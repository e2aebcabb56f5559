"""Attention of queries that are nodes of a tree: every native build and torch, against a sequence for each branch."""

from dataclasses import replace

import pytest
import torch
from attention_harness import Case, make_batch

from warmroot.actors.attention.interface import TreeBackend
from warmroot.actors.attention.latent import TorchLatentAttention
from warmroot.actors.attention.native_backend import NativeAttention
from warmroot.actors.attention.native_latent import NativeLatentAttention
from warmroot.actors.attention.torch_backend import TorchAttention
from warmroot.actors.engine.draft_tree import ancestor_masks
from warmroot.actors.kernels.library import runnable

SCALE = 0.2
LIBRARIES = {library.name: library for library in runnable()}
BACKENDS = ["torch", "generic", "avx2", "avx512"]
WIDE = (-1, -1, -1, 0, 0, 1, 3, 3, 6, 4, 8, 10)
DEEP = (-1, -1, 0, 2, 3, 4, 5, 1, 6, 8, 9)
BUSHY = tuple((node - 1) // 2 for node in range(31))
CASES = {
    "one tree": (Case((13,), (50,)), [WIDE]),
    "over a tile's edge": (Case((13,), (70,)), [WIDE]),
    "over a run's edge": (Case((13, 13), (260, 265)), [WIDE, WIDE]),
    "from the first key on": (Case((12,), (12,)), [DEEP]),
    "more rows than an item": (Case((32,), (290,), heads=(9, 3), head_dim=64), [BUSHY]),
    "beside decodes and chunks": (Case((1, 13, 20, 12), (90, 50, 20, 140)), [None, WIDE, None, DEEP]),
    "window": (Case((13, 12), (50, 300), window=9), [WIDE, DEEP]),
    "window shorter than a branch": (Case((12, 12), (50, 67), window=3), [DEEP, DEEP]),
    "window of one": (Case((12,), (50,), window=1), [DEEP]),
    "softcap": (Case((13, 1), (20, 70), softcap=2.0), [WIDE, None]),
    "odd pages": (Case((13, 12), (50, 33), block_size=4), [WIDE, DEEP]),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "torch":
        return TorchAttention()
    if request.param not in LIBRARIES:
        pytest.skip(f"no {request.param} here")
    return NativeAttention(LIBRARIES[request.param])


def with_trees(batch, trees):
    """The batch's metadata with a mask for sequences that have a tree behind their first query."""
    rows = []
    starts = batch.metadata.cu_seqlens_q.tolist()
    for tree, start, end in zip(trees, starts, starts[1:], strict=False):
        rows += [0] * (end - start) if tree is None else ancestor_masks(tree)
        assert tree is None or len(tree) == end - start - 1
    return replace(batch.metadata, tree_mask=torch.tensor(rows))


def naive(case, batch, trees):
    """Each query by its own branch, laid out as a plain sequence."""
    group, rows = case.heads[0] // case.heads[1], []
    for index, (count, length) in enumerate(zip(case.queries, case.keys, strict=True)):
        begin = length - count
        parents = trees[index] or tuple(range(-1, count - 2))
        for row in range(count):
            branch, node = [], row - 1
            while node >= 0:
                branch.insert(0, begin + 1 + node)
                node = parents[node]
            line = [*range(begin + 1), *branch]
            seen = line if case.window is None else line[-case.window :]
            for head in range(case.heads[0]):
                k, v = (x[index][seen, head // group] for x in (batch.keys, batch.values))
                scores = k @ batch.query[len(rows) // case.heads[0], head] * SCALE
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                rows.append(torch.softmax(scores, 0) @ v)
    return torch.stack(rows).view(batch.query.shape)


def pages(backend, batch):
    if backend.name == "torch":
        return batch.k_cache, batch.v_cache
    return batch.k_cache.permute(0, 2, 3, 1).contiguous(), batch.v_cache.permute(0, 2, 1, 3).contiguous()


@pytest.mark.parametrize("name", CASES)
def test_a_node_sees_the_context_and_its_ancestors(backend, name):
    case, trees = CASES[name]
    batch = make_batch(case)
    found = backend.forward(
        batch.query,
        *pages(backend, batch),
        with_trees(batch, trees),
        scale=SCALE,
        window=case.window,
        softcap=case.softcap,
    )
    torch.testing.assert_close(found, naive(case, batch, trees), atol=2e-5, rtol=2e-5)


def test_a_chain_is_what_it_was(backend):
    """To the bit: the mask of a chain hides nothing."""
    case = Case((6, 5), (50, 261))
    batch = make_batch(case)
    options = {"scale": SCALE, "window": None, "softcap": None}
    plain = backend.forward(batch.query, *pages(backend, batch), batch.metadata, **options)
    chains = with_trees(batch, [tuple(range(-1, count - 2)) for count in case.queries])
    assert torch.equal(backend.forward(batch.query, *pages(backend, batch), chains, **options), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_move(backend, dtype):
    assert isinstance(backend, TreeBackend)
    shapes = backend.page_shapes(4, 2, 16)
    keys, values = (tuple(torch.randn(7, *shape).to(dtype) for _ in range(3)) for shape in shapes)
    before = [cache.clone() for cache in (*keys, *values)]
    sources, destinations = torch.tensor([9, 15, 22]), torch.tensor([8, 9, 10])
    backend.move(keys, values, sources, destinations)
    for cache, old, is_keys in zip((*keys, *values), before, [True] * 3 + [False] * 3, strict=True):
        now, was = (tokens_of(backend, x, is_keys) for x in (cache, old))
        assert torch.equal(now[destinations], was[sources])
        others = [slot for slot in range(28) if slot not in destinations]
        assert torch.equal(now[others], was[others])


def tokens_of(backend, cache, is_keys):
    """[slots, heads, dim]"""
    if backend.name == "native":
        cache = cache.permute(0, 3, 1, 2) if is_keys else cache.permute(0, 2, 1, 3)
    return cache.reshape(28, 2, 16)


@pytest.mark.parametrize("name", BACKENDS)
def test_latents(name):
    if name != "torch" and name not in LIBRARIES:
        pytest.skip(f"no {name} here")
    latent = TorchLatentAttention() if name == "torch" else NativeLatentAttention(LIBRARIES[name])
    case = Case((13, 12), (50, 261), heads=(4, 1), head_dim=32)
    batch = make_batch(case)
    batch.values = batch.keys
    cache = batch.k_cache.flatten(2).contiguous()
    metadata = with_trees(batch, [WIDE, DEEP])
    found = latent.forward(batch.query, cache, metadata, scale=SCALE, value_size=32)
    torch.testing.assert_close(found, naive(case, batch, [WIDE, DEEP]), atol=2e-5, rtol=2e-5)
    was = cache.flatten(0, 1).clone()
    latent.move((cache,), (cache.new_empty(len(cache), 16, 0),), torch.tensor([20, 40]), torch.tensor([18, 19]))
    now = cache.flatten(0, 1)
    assert torch.equal(now[[18, 19]], was[[20, 40]]) and torch.equal(now[20:], was[20:])
