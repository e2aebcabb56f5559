"""KV in eight-bit floats: entries against torch's own casts, attention of every backend against plain numbers."""

import pytest
import torch
from quantised_harness import Paged, tokens

from warmroot.actors.attention.float8 import decode, encode
from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.native_backend import NativeAttention
from warmroot.actors.attention.torch_backend import TorchAttention
from warmroot.actors.kernels.library import native

HALVES = (torch.float16, torch.bfloat16, torch.float32)


class Float8Paged(Paged):
    def pages(self, index):
        whole = self.tables[index][: self.lengths[index] // self.block_size]
        return self.kv.keys[0][whole], self.kv.values[0][whole]

    def read_back(self, index):
        table, length = self.tables[index], self.lengths[index]
        keys, values = (
            decode(cache[table].flatten(0, 1), torch.float32)[:length] for cache in (self.kv.keys[0], self.kv.values[0])
        )
        return keys, values

    def in_own_block(self, k):
        return decode(encode(k), torch.float32)


@pytest.fixture(params=["torch", "native"])
def backend(request):
    if request.param == "native" and native() is None:
        pytest.skip("no native kernels here")
    return TorchAttention() if request.param == "torch" else NativeAttention()


def test_entries_are_e4m3_codes_and_a_scale():
    largest = encode(torch.tensor([448.0, -224.0, 1.0, 0.0]))
    assert largest.tolist() == [0x7E, 0xF6, 0x38, 0, 0x80, 0x3F]  # 448, -224, 1, 0; bfloat16 1.0
    assert decode(largest, torch.float32).tolist() == [448.0, -224.0, 1.0, 0.0]
    x = torch.randn(50, 2, 7, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 6, 50)[:, None, None]
    entries = encode(x)
    assert entries.shape == (50, 2, 9) and entries.dtype == torch.uint8
    read = decode(entries, torch.float32)
    # Three bits of mantissa; where an entry's largest element is 2^15 times larger, steps of 2^-10 of its scale.
    scale = x.abs().amax(-1, keepdim=True) / 448
    assert ((read - x).abs() <= torch.maximum(x.abs() / 16, 2.0**-10 * 1.01 * scale)).all()


def test_every_code_is_what_torch_takes_it_for():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    one = torch.tensor([0x80, 0x3F], dtype=torch.uint8)
    is_number = ~numbers.isnan()
    assert is_number.sum() == 254
    assert torch.equal(decode(torch.cat((codes, one)), torch.float32)[is_number], numbers[is_number])
    assert decode(encode(torch.tensor([1.0, torch.nan])), torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_read_once_rounded(dtype):
    entries = encode(torch.randn(20, 64, generator=torch.Generator().manual_seed(1)) * 1e-3)
    assert torch.equal(decode(entries, dtype), decode(entries, torch.float32).to(dtype))


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-38, -1e-40], [3e38, -2e38], [1e-30, 2e-30]])
def test_extremes_are_read_as_what_they_are(values):
    x = torch.tensor(values)
    torch.testing.assert_close(decode(encode(x), torch.float32), x, rtol=1 / 16, atol=2.0**-110)


OPTIONS = [
    {},
    {"heads": (9, 3), "head_dim": 64},
    {"heads": (3, 3), "head_dim": 24, "block_size": 5},
    {"block_size": 48, "window": 33},
    {"window": 20, "softcap": 3.0},
    {"heads": (8, 1), "head_dim": 136, "block_size": 32, "softcap": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("elements", [1 << 24, 2000])
def test_attention_equals_naive_in_any_steps(backend, options, elements):
    backend._float8.most_elements = elements  # one tile, or many
    paged = Float8Paged(backend, "fp8", **options)
    data = {index: tokens(length, paged.heads, paged.head_dim, index) for index, length in enumerate((75, 130, 18))}
    outputs = {index: [] for index in data}
    for step in [{0: 40, 1: 70}, {0: 1, 1: 4, 2: 16}, {0: 1, 2: 1}, {1: 56, 0: 30}, {0: 3, 2: 1}]:
        chunks = {}
        for index, count in step.items():
            start = paged.lengths.get(index, 0)
            chunks[index] = tuple(part[start : start + count] for part in data[index])
        for index, out in paged.step(chunks).items():
            outputs[index].append(out)
    for index, parts in outputs.items():
        torch.testing.assert_close(torch.cat(parts), paged.naive(index, *data[index][:2]), atol=2e-4, rtol=2e-4)


def test_sequences_with_a_common_prefix(backend):
    """Whole blocks that two decodes share, in tiles of their own."""
    backend._float8.most_elements = 4000
    paged = Float8Paged(backend, "fp8", block_size=4)
    q, k, v = tokens(82, paged.heads, paged.head_dim)
    paged.step({0: (q[:80], k[:80], v[:80])})
    paged.tables[1], paged.lengths[1] = list(paged.tables[0]), 80
    out = paged.step({0: (q[80:81], k[80:81], v[80:81]), 1: (q[81:], k[81:], v[81:])})
    for index, last in ((0, 80), (1, 81)):
        order = [*range(80), last]
        torch.testing.assert_close(out[index][0], paged.naive(index, q[order], k[order])[80], atol=2e-4, rtol=2e-4)


def test_rows_have_the_same_bits_in_any_batch_and_steps(backend):
    if isinstance(backend, TorchAttention):
        pytest.skip("torch sums in an order of its own")
    backend._float8.most_elements = 40_000
    alone, together = Float8Paged(backend, "fp8", heads=(9, 3)), Float8Paged(backend, "fp8", heads=(9, 3))
    data = [tokens(304, (9, 3), 32, seed) for seed in range(3)]
    alone.step({0: tuple(part[:300] for part in data[0])})
    together.step({index: tuple(part[:300] for part in parts) for index, parts in enumerate(data)})
    outputs = [alone.step({0: tuple(part[t : t + 1] for part in data[0])})[0] for t in range(300, 304)]
    verified = together.step({index: tuple(part[300:] for part in parts) for index, parts in enumerate(data)})
    assert torch.equal(torch.cat(outputs), verified[0])


def test_bytes_do_not_depend_on_steps(backend):
    q, k, v = tokens(48, (6, 2), 32)
    whole, single = Float8Paged(backend, "fp8"), Float8Paged(backend, "fp8")
    whole.step({0: (q, k, v)})
    for t in range(48):
        single.step({0: (q[t : t + 1], k[t : t + 1], v[t : t + 1])})
    assert all(map(torch.equal, whole.pages(0), single.pages(0)))
    assert whole.kv.open is None


def test_copied_blocks_are_read_alike(backend):
    paged = Float8Paged(backend, "fp8")
    q, k, v = tokens(21, (6, 2), 32)
    paged.step({0: (q[:20], k[:20], v[:20])})
    first, partial = paged.tables[0]
    copy = paged.free.pop()
    paged.kv.copy_blocks(((partial, copy),))
    paged.tables[1], paged.lengths[1] = [first, copy], 20
    out = paged.step({0: (q[20:], k[20:], v[20:]), 1: (q[20:], k[20:], v[20:])})
    torch.testing.assert_close(out[0], out[1])
    assert torch.equal(paged.kv.keys[0][partial], paged.kv.keys[0][copy])


def test_trees_and_what_is_accepted_of_them(backend):
    """Two guesses for one place: each sees itself and what is before both; the second is then moved to its place."""
    paged, chain = Float8Paged(backend, "fp8"), Float8Paged(backend, "fp8")
    q, k, v = tokens(20, (6, 2), 32)
    for one in (paged, chain):
        one.step({0: (q[:17], k[:17], v[:17])})
    expected = chain.step({0: (q[17:], k[17:], v[17:])})[0]  # token 17, then 18, then 19
    table = paged.tables[0]
    order = [17, 19, 18]  # 19 is a rejected sibling of 18
    slots = torch.tensor([table[p // 16] * 16 + p % 16 for p in (17, 18, 19)])
    metadata = AttentionMetadata(
        torch.tensor([0, 3], dtype=torch.int32), torch.tensor([20], dtype=torch.int32),
        torch.tensor([table], dtype=torch.int32), slots, 3, 20, torch.tensor([0b001, 0b011, 0b101]),
    )  # fmt: skip
    cache = paged.kv.keys[0], paged.kv.values[0]
    backend.append(k[order], v[order], *cache, slots)
    out = backend.forward(q[order], *cache, metadata, scale=paged.scale, window=None, softcap=None)
    torch.testing.assert_close(out[[0, 2]], expected[:2], atol=1e-5, rtol=1e-5)
    backend.move(paged.kv.keys, paged.kv.values, slots[2:], slots[1:2])
    paged.lengths[0] = 19
    again = paged.step({0: (q[19:], k[19:], v[19:])})[0]
    torch.testing.assert_close(again[0], expected[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES[:2])
def test_half_precision_queries(dtype):
    paged = Float8Paged(TorchAttention(), "fp8")
    q, k, v = tokens(40, (6, 2), 32)
    out = paged.step({0: (q.to(dtype), k, v)})[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), paged.naive(0, q, k), atol=0.1, rtol=0.05)
