"""Attention over paged latents, and the memory that holds them."""

from dataclasses import replace

import pytest
import torch
from attention_harness import CASES, Case, make_batch
from layout_models import MLA

from warmroot.actors.attention import latent
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.attention.latent import LatentAttention
from warmroot.actors.runner.memory import page_bytes
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
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


def attend(batch, cache: torch.Tensor) -> torch.Tensor:
    return LatentAttention().forward(batch.query, cache, batch.metadata, scale=SCALE, value_size=VALUE_SIZE)


@pytest.mark.parametrize("most_scores", [1 << 22, 300, 1])
@pytest.mark.parametrize("name", PLAIN)
def test_every_query_sees_what_came_before(name, most_scores, monkeypatch):
    monkeypatch.setattr(latent, "_MOST_SCORES", most_scores)
    batch = make_batch(PLAIN[name])
    torch.testing.assert_close(attend(batch, batch.k_cache[:, :, 0]), naive(PLAIN[name], batch))


def test_a_common_prefix_is_read_once():
    case = Case((1, 1, 1), (300, 290, 275), heads=(4, 1))
    batch = make_batch(case)
    table, shared = batch.metadata.block_table.clone(), 17
    cache = batch.k_cache[:, :, 0].clone()
    cache[table[1:, :shared]] = cache[table[0, :shared]]
    apart = attend(batch, cache)
    table[1:, :shared] = table[0, :shared]
    batch.metadata = replace(batch.metadata, block_table=table)
    torch.testing.assert_close(attend(batch, cache), apart)


def test_entries_come_back_from_pages_of_another_dtype():
    backend, kv = (
        LatentAttention(),
        KvMemory.allocate(KvLayout.of((None,) * 2, 4), 3, 1, 6, torch.float16, CPU, LatentAttention()),
    )
    assert [tuple(pages.shape) for pages in (*kv.keys, *kv.values)] == [(3, 4, 6)] * 2 + [(3, 4, 0)] * 2
    entries = torch.arange(12.0).view(2, 6)
    backend.append(entries, kv.keys[0], torch.tensor([7, 8]))
    assert torch.equal(kv.keys[0][1, 3].float(), entries[0])
    assert torch.equal(kv.keys[0][2, 0].float(), entries[1])
    kv.copy_blocks(((2, 1),))
    assert torch.equal(kv.keys[0][1], kv.keys[0][2])


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_what_is_counted_is_what_is_allocated(name, dtype):
    layout = KvLayout.of(MLA.layer_windows, 16)
    kv = KvMemory.allocate(layout, 5, MLA.cache_heads, MLA.cache_dim, dtype, CPU, LatentAttention())
    allocated = sum(pages.nbytes for pages in (*kv.keys, *kv.values))
    assert MLA.cached_elements == 40
    assert allocated == 5 * page_bytes(MLA, layout, dtype) == 5 * 16 * 4 * 40 * dtype.itemsize
    for rank in ParallelLayout.of(MLA, Topology(tp=2)).ranks:
        assert rank.kv_token_bytes(KV_FORMATS[name]) * 5 * 16 == allocated
