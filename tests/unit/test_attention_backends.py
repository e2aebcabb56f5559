"""The attention contract, against a naive float32 reference; the same cases run on flash-attention where a GPU is."""

import math
from dataclasses import replace

import pytest
import torch
from attention_harness import CASES, Case, make_batch, naive

from warmroot.actors.attention import make_backend
from warmroot.actors.attention.buckets import make_buckets
from warmroot.actors.attention.flash_backend import FlashAttention
from warmroot.actors.attention.torch_backend import TorchAttention
from warmroot.actors.kernels.library import native
from warmroot.cluster.errors import ConfigError

BLOCK_SIZE = 16


def attend(backend, case, batch, scale):
    return backend.forward(
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.metadata,
        scale=scale,
        window=case.window,
        softcap=case.softcap,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_torch_equals_naive(case):
    batch, scale = make_batch(case), 1.3 / math.sqrt(case.head_dim)
    torch.testing.assert_close(
        attend(TorchAttention(), case, batch, scale), naive(case, batch, scale), atol=2e-5, rtol=2e-5
    )


def test_torch_reads_a_half_precision_cache():
    case = CASES["mixed"]
    batch = make_batch(case, dtype=torch.bfloat16)
    batch.query = batch.query.float()
    torch.testing.assert_close(
        attend(TorchAttention(), case, batch, 0.2), naive(case, batch, 0.2), atol=2e-5, rtol=2e-5
    )


def test_torch_keeps_plans_of_steps_and_windows_apart():
    backend = TorchAttention()
    cases = [CASES["window over blocks"], CASES["mixed"], Case((1, 1, 1), (20, 61, 300))]
    batches = [make_batch(case) for case in cases]
    for _ in range(2):
        for case, batch in zip(cases, batches, strict=True):
            torch.testing.assert_close(attend(backend, case, batch, 0.2), naive(case, batch, 0.2), atol=2e-5, rtol=2e-5)
    narrow = replace(cases[2], window=33)
    expected = naive(narrow, batches[2], 0.2)
    torch.testing.assert_close(attend(backend, narrow, batches[2], 0.2), expected, atol=2e-5, rtol=2e-5)


def test_append_stores_only_the_slots():
    cache_k, cache_v = torch.zeros(3, BLOCK_SIZE, 2, 4), torch.zeros(3, BLOCK_SIZE, 2, 4, dtype=torch.float16)
    keys, values = torch.randn(2, 3, 2, 4)
    TorchAttention().append(keys, values, cache_k, cache_v, torch.tensor([47, 16, 33]))
    assert torch.equal(cache_k[2, 15], keys[0])
    assert torch.equal(cache_k[1, 0], keys[1])
    assert torch.equal(cache_v[2, 1], values[2].half())
    assert cache_k.count_nonzero() == keys.numel()


def test_make_backend_picks_the_native_kernels_on_a_cpu_for_float32():
    expected = "torch" if native() is None else "native"
    assert make_backend(torch.device("cpu")).name == expected
    assert make_backend(torch.device("cpu"), torch.bfloat16).name == "torch"


def test_make_backend_picks_flash_for_half_precision_on_cuda(kernels):
    assert make_backend(torch.device("cuda"), torch.bfloat16).name == "flash"
    assert make_backend(torch.device("cuda"), torch.float32).name == "torch"


def test_flash_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm_flash_attn", None)
    with pytest.raises(ConfigError, match=r"warmroot\[gpu\]"):
        make_backend(torch.device("cuda"))


class RecordingKernels:
    """What FlashAttention passes on, without a GPU."""

    def __init__(self):
        self.calls = []

    def flash_attn_varlen_func(self, *args, **kwargs):
        self.calls.append(("varlen", args, kwargs))

    def flash_attn_with_kvcache(self, *args, **kwargs):
        self.calls.append(("kvcache", args, kwargs))


@pytest.fixture
def kernels(monkeypatch):
    recording = RecordingKernels()
    monkeypatch.setitem(__import__("sys").modules, "vllm_flash_attn", recording)
    return recording


def test_flash_passes_the_block_table_straight_through(kernels):
    case = CASES["softcap, window, mixed"]
    batch = make_batch(case)
    out = attend(FlashAttention(), case, batch, 0.2)
    [(kernel, args, kwargs)] = kernels.calls
    assert kernel == "varlen"
    assert args[1] is batch.k_cache
    assert args[4].tolist() == [0, 60, 159, 189]
    assert args[4].dtype == torch.int32
    assert kwargs["block_table"] is batch.metadata.block_table
    assert kwargs["out"] is out
    assert kwargs["window_size"] == (19, 0)
    assert (kwargs["causal"], kwargs["softcap"], kwargs["softmax_scale"]) == (True, 3.0, 0.2)


def test_flash_decodes_with_the_split_kernel(kernels):
    case = CASES["decodes of odd lengths"]
    batch = make_batch(case)
    attend(FlashAttention(), case, batch, 0.2)
    [(kernel, args, kwargs)] = kernels.calls
    assert kernel == "kvcache"
    assert args[0].shape == (3, 1, 4, 32)
    assert kwargs["cache_seqlens"] is batch.metadata.seqused_k
    assert kwargs["window_size"] == (-1, -1)
    assert kwargs["softcap"] == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flash_equals_naive(case):
    batch, scale = make_batch(case, "cuda", torch.float16), 1.3 / math.sqrt(case.head_dim)
    out = attend(make_backend(torch.device("cuda")), case, batch, scale)
    torch.testing.assert_close(out.float().cpu(), naive(case, batch, scale), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("lengths", [(300, 301, 290, 400), (273, 273, 900, 257), (257, 40, 600, 5)])
def test_a_shared_prefix_changes_nothing(lengths, softcap):
    """Decodes whose tables begin with the same blocks are read together; copies of those blocks are not."""
    batch = make_batch(Case((1,) * 4, lengths, heads=(9, 3), softcap=softcap))
    table, shared = batch.metadata.block_table, 16
    for row in (1, 2, 3):
        size = min(shared, lengths[row] // BLOCK_SIZE)
        for cache in (batch.k_cache, batch.v_cache):
            cache[table[row, :size]] = cache[table[0, :size]]
    apart = _decode(batch, batch.metadata, softcap)
    together = table.clone()
    for row in (1, 2, 3):
        size = min(shared, lengths[row] // BLOCK_SIZE)
        together[row, :size] = table[0, :size]
    assert _read_together(batch.metadata, together)
    torch.testing.assert_close(_decode(batch, replace(batch.metadata, block_table=together), softcap), apart)


def _decode(batch, metadata, softcap):
    return TorchAttention().forward(
        batch.query, batch.k_cache, batch.v_cache, metadata, scale=0.2, window=None, softcap=softcap
    )


def _read_together(metadata, table):
    buckets = make_buckets(replace(metadata, block_table=table), BLOCK_SIZE, None, torch.float32)
    return any(bucket.shared is not None for bucket in buckets)
