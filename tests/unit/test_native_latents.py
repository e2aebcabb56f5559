"""Attention over paged latents, and the memory that holds them."""

from dataclasses import replace

import pytest
import torch
from attention_harness import CASES, Case, make_batch
from layout_models import MLA

from warmroot.actors.attention import latent
from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.attention.latent import TorchLatentAttention
from warmroot.actors.attention.native_latent import NativeLatentAttention
from warmroot.actors.kernels.by_head import ByHead
from warmroot.actors.kernels.library import runnable
from warmroot.actors.runner.memory import page_bytes
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
LIBRARIES = runnable()
VALUE_SIZE = 20
SCALE = 0.2
PLAIN = {
    name: replace(case, heads=(case.heads[0], 1))
    for name, case in CASES.items()
    if case.window is None and case.softcap is None
}


def naive(case: Case, batch) -> torch.Tensor:
    """One query at a time, as the class's words say."""
    rows, query = [], iter(batch.query)
    for queries, length, keys in zip(case.queries, case.keys, batch.keys, strict=True):
        for position in range(length - queries, length):
            seen = keys[: position + 1, 0]
            rows.append(torch.softmax(next(query) @ seen.T * SCALE, -1) @ seen[:, :VALUE_SIZE])
    return torch.stack(rows)


def attend(backend, batch, cache: torch.Tensor) -> torch.Tensor:
    return backend.forward(batch.query, cache, batch.metadata, scale=SCALE, value_size=VALUE_SIZE)


@pytest.fixture(params=["torch", *(library.name for library in LIBRARIES)])
def backend(request):
    if request.param == "torch":
        return TorchLatentAttention()
    return NativeLatentAttention(next(library for library in LIBRARIES if library.name == request.param))


@pytest.mark.parametrize("most_scores", [300, 1])
@pytest.mark.parametrize("name", PLAIN)
def test_torch_holds_few_scores_at_a_time(name, most_scores, monkeypatch):
    monkeypatch.setattr(latent, "_MOST_SCORES", most_scores)
    batch = make_batch(PLAIN[name])
    torch.testing.assert_close(
        attend(TorchLatentAttention(), batch, batch.k_cache[:, :, 0]), naive(PLAIN[name], batch), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_every_query_sees_what_came_before(backend, name, dtype):
    batch = make_batch(PLAIN[name], dtype=dtype)
    batch.query = batch.query.float()
    found = attend(backend, batch, batch.k_cache[:, :, 0])
    torch.testing.assert_close(found, naive(PLAIN[name], batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("size", "block_size"), [(40, 16), (21, 16), (24, 4), (40, 5)])
def test_any_size(backend, size, block_size):
    case = Case((1, 13, 1, 70), (90, 50, 300, 70), heads=(9, 1), head_dim=size, block_size=block_size)
    batch = make_batch(case)
    found = attend(backend, batch, batch.k_cache[:, :, 0].contiguous())
    torch.testing.assert_close(found, naive(case, batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_natively_a_row_is_the_same_bits_in_any_batch(library):
    case = Case((1, 13, 1), (90, 50, 300), heads=(9, 1))
    batch = make_batch(case)
    cache = batch.k_cache[:, :, 0].contiguous()
    together = attend(NativeLatentAttention(library), batch, cache)
    for row in range(1, 14):
        length = 37 + row
        alone = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            seqused_k=torch.tensor([length], dtype=torch.int32),
            block_table=batch.metadata.block_table[1:2].clone(),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            max_seqlen_q=1,
            max_seqlen_k=length,
        )
        found = NativeLatentAttention(library).forward(
            batch.query[row : row + 1], cache, alone, scale=SCALE, value_size=VALUE_SIZE
        )
        assert torch.equal(found[0], together[row])


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize(("heads", "inner", "outer"), [(4, 128, 64), (3, 16, 24), (5, 7, 13), (1, 1, 1), (2, 64, 200)])
def test_by_head(library, heads, inner, outer):
    """Rows and heads may lie apart, and a row does not depend on the others."""
    multiply, weights = ByHead(library), torch.randn(heads, inner, outer)
    for rows in (1, 2, 3, 4, 9, 70):
        x = torch.randn(rows, heads, inner + 3)[..., :inner]
        found = multiply(x, weights)
        torch.testing.assert_close(found, torch.einsum("thi,hio->tho", x, weights), atol=1e-4, rtol=1e-5)
        assert torch.equal(multiply(x[-1:], weights)[0], found[-1])


def test_a_common_prefix_is_read_once(backend):
    case = Case((1, 1, 1), (300, 290, 275), heads=(4, 1))
    batch = make_batch(case)
    table, shared = batch.metadata.block_table.clone(), 17
    cache = batch.k_cache[:, :, 0].clone()
    cache[table[1:, :shared]] = cache[table[0, :shared]]
    apart = attend(backend, batch, cache)
    table[1:, :shared] = table[0, :shared]
    batch.metadata = replace(batch.metadata, block_table=table)
    torch.testing.assert_close(attend(backend, batch, cache), apart)


def test_entries_come_back_from_pages_of_another_dtype(backend):
    kv = KvMemory.allocate(KvLayout.of((None,) * 2, 4), 3, 1, 6, torch.float16, CPU, backend)
    assert [tuple(pages.shape) for pages in (*kv.keys, *kv.values)] == [(3, 4, 6)] * 2 + [(3, 4, 0)] * 2
    entries = torch.arange(12.0).view(2, 6)
    backend.append(entries, kv.keys[0], torch.tensor([7, 8]))
    assert torch.equal(kv.keys[0][1, 3].float(), entries[0])
    assert torch.equal(kv.keys[0][2, 0].float(), entries[1])
    assert kv.keys[0].count_nonzero() == 11
    kv.copy_blocks(((2, 1),))
    assert torch.equal(kv.keys[0][1], kv.keys[0][2])


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_what_is_counted_is_what_is_allocated(name, dtype):
    layout = KvLayout.of(MLA.layer_windows, 16)
    kv = KvMemory.allocate(layout, 5, MLA.cache_heads, MLA.cache_dim, dtype, CPU, TorchLatentAttention())
    allocated = sum(pages.nbytes for pages in (*kv.keys, *kv.values))
    assert MLA.cached_elements == 40
    assert allocated == 5 * page_bytes(MLA, layout, dtype) == 5 * 16 * 4 * 40 * dtype.itemsize
    for rank in ParallelLayout.of(MLA, Topology(tp=2)).ranks:
        assert rank.kv_token_bytes(KV_FORMATS[name]) * 5 * 16 == allocated
