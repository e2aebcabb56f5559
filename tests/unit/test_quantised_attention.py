"""Quantised KV: pages and attention of torch and of every native library against plain numpy."""

import numpy as np
import pytest
import torch
from quantised_harness import Paged, quantise_block, quantise_token, tokens

from warmroot.actors.attention.kv_codec import PageCodec
from warmroot.actors.attention.native_backend import NativeAttention
from warmroot.actors.attention.torch_backend import TorchAttention
from warmroot.actors.kernels.library import runnable
from warmroot.cluster.kv_formats import KV_FORMATS

LIBRARIES = {library.name: library for library in runnable()}
FORMATS = ("int8", "int4", "k8v4")


@pytest.fixture(params=["torch", "generic", "avx2", "avx512"])
def backend(request):
    if request.param == "torch":
        yield TorchAttention()
        return
    if request.param not in LIBRARIES:
        pytest.skip(f"no {request.param} here")
    library = LIBRARIES[request.param]
    before = library.num_threads
    library.set_num_threads(2)
    yield NativeAttention(library)
    library.set_num_threads(before)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 1), (24, 5), (7, 8), (64, 16), (160, 16), (33, 32), (256, 3)])
def test_pages_equal_numpy(backend, fmt, head_dim, block_size):
    paged = Paged(backend, fmt, head_dim=head_dim, block_size=block_size)
    q, k, v = tokens(37, paged.heads, head_dim)
    for chunk in (slice(0, 20), slice(20, 21), slice(21, 37)):
        paged.step({0: (q[chunk], k[chunk], v[chunk])})
    keys, values = (part.numpy() for part in paged.read_back(0))
    bits = KV_FORMATS[fmt].key.bits, KV_FORMATS[fmt].value.bits
    wrong = 0
    for head in range(2):
        for first in range(0, 37, block_size):
            block = slice(first, first + block_size)
            expected = quantise_block(k[block, head].numpy(), bits[0])
            wrong += (np.abs(keys[block, head] - expected) > 1e-5 * np.abs(expected).max()).sum()
            assert np.abs(keys[block, head] - expected).max() <= np.ptp(expected, 0).max() / (2 ** bits[0] - 1) + 1e-4
        for t in range(37):
            expected = quantise_token(v[t, head].numpy(), bits[1])
            wrong += (np.abs(values[t, head] - expected) > 1e-5 * np.abs(expected).max()).sum()
    assert wrong <= 1e-3 * keys.size


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_errors_are_half_a_step(fmt):
    codec = PageCodec(KV_FORMATS[fmt], 64, 16)
    keys = tokens(16, (1, 1), 64)[1].permute(1, 2, 0)[None]  # [1, 1, D, S]
    read = codec.decode_keys(codec.encode_keys(keys, torch.tensor([16])))
    step = (keys.amax(-1) - keys.amin(-1)) / (2**codec.format.key.bits - 1)
    # Scales are rounded up in units of the widest channel's 255th, minima down in those of their own range.
    slack = (step.amax() / 255 + (keys.amin(-1).max() - keys.amin()) / 255 / (2**codec.format.key.bits - 1)) * 1.02
    assert ((keys - read).abs().amax(-1) <= 0.51 * (1.02 * step + slack)).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (9, 3), "head_dim": 64},
        {"heads": (3, 3), "head_dim": 24, "block_size": 5},
        {"block_size": 48, "window": 33},
        {"window": 20, "softcap": 3.0},
        {"heads": (8, 1), "head_dim": 136, "block_size": 32, "softcap": 2.0},
    ],
    ids=str,
)
def test_attention_equals_naive_in_any_steps(backend, fmt, options):
    paged = Paged(backend, fmt, **options)
    data = {index: tokens(length, paged.heads, paged.head_dim, index) for index, length in enumerate((75, 130, 18))}
    outputs = {index: [] for index in data}
    steps = [{0: 40, 1: 70}, {0: 1, 1: 4, 2: 16}, {0: 1, 2: 1}, {1: 56, 0: 30}, {0: 3, 2: 1}]
    for step in steps:
        chunks = {}
        for index, count in step.items():
            start = paged.lengths.get(index, 0)
            chunks[index] = tuple(part[start : start + count] for part in data[index])
        for index, out in paged.step(chunks).items():
            outputs[index].append(out)
    for index, parts in outputs.items():
        torch.testing.assert_close(torch.cat(parts), paged.naive(index, *data[index][:2]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_do_not_depend_on_steps(backend, fmt):
    q, k, v = tokens(100, (6, 2), 32)
    whole, single, mixed = (Paged(backend, fmt) for _ in range(3))
    whole.step({0: (q, k, v)})
    for t in range(100):
        single.step({0: (q[t : t + 1], k[t : t + 1], v[t : t + 1])})
    for first, last in ((0, 7), (7, 50), (50, 51), (51, 100)):
        mixed.step({0: (q[first:last], k[first:last], v[first:last])})
    for other in (single, mixed):
        assert all(map(torch.equal, whole.pages(0), other.pages(0)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_tokens_taken_back_leave_no_trace(backend, fmt):
    """As after rejected drafts, over a block's end."""
    q, k, v = tokens(40, (6, 2), 32)
    plain, drafted = Paged(backend, fmt), Paged(backend, fmt)
    expected = [plain.step({0: (q[a:b], k[a:b], v[a:b])})[0] for a, b in ((0, 14), (14, 15), (15, 16), (16, 40))]
    drafted.step({0: (q[:14], k[:14], v[:14])})
    draft = (torch.cat((part[14:15], 9 * part[30:35])) for part in (q, k, v))
    torch.testing.assert_close(drafted.step({0: tuple(draft)})[0][:1], expected[1])
    drafted.lengths[0] = 15
    torch.testing.assert_close(drafted.step({0: (q[15:], k[15:], v[15:])})[0][1:], expected[3])
    assert all(map(torch.equal, plain.pages(0), drafted.pages(0)))


def test_rows_do_not_depend_on_the_batch(backend):
    if isinstance(backend, TorchAttention):
        pytest.skip("torch sums in an order of its own")
    alone, together = Paged(backend, "int8", heads=(9, 3)), Paged(backend, "int8", heads=(9, 3))
    data = [tokens(301, (9, 3), 32, seed) for seed in range(3)]
    alone.step({0: tuple(part[:300] for part in data[0])})
    together.step({index: tuple(part[:300] for part in parts) for index, parts in enumerate(data)})
    last = {index: tuple(part[300:] for part in parts) for index, parts in enumerate(data)}
    assert torch.equal(alone.step({0: last[0]})[0], together.step(last)[0])


def test_reopened_blocks_go_on_from_their_pages(backend):
    """Where a block's 16-bit keys are gone, those of its page take their place."""
    q, k, v = tokens(24, (6, 2), 32)
    paged = Paged(backend, "int8")
    paged.step({0: (q[:20], k[:20], v[:20])})
    before = paged.read_back(0)[0]
    paged.kv.open.close(paged.tables[0][1])
    paged.step({0: (q[20:], k[20:], v[20:])})
    torch.testing.assert_close(paged.read_back(0)[0][:20], before, atol=0.05, rtol=0.0)
    copy = 150
    paged.kv.copy_blocks(((paged.tables[0][1], copy),))
    assert torch.equal(paged.kv.keys[0].pages[copy], paged.kv.keys[0].pages[paged.tables[0][1]])
