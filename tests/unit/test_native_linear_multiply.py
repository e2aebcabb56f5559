"""Products with packed weights against float64, for every instruction set and 1 and 2 threads."""

from dataclasses import replace

import gguf
import pytest
import torch
from native_linear_harness import LIBRARIES, assert_equal_up_to_rounding, expected, grouped, noise, q4_k_blocks, run

from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import LinearKernels, NativeLinear, NativeMethod, PackedWeight, WeightFormat, pack

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels")
FORMATS = [*WeightFormat, "Q4 with minima", "Q4_K", "Q4 with zeros", "Q8 with zeros", "Q4 in its own order"]
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 25, 31, 49, 70]


@pytest.fixture(
    params=[(library, threads) for library in LIBRARIES for threads in (1, 2)], ids=lambda p: f"{p[0].name}-{p[1]}"
)
def kernels(request):
    library, threads = request.param
    before = library.num_threads
    library.set_num_threads(threads)
    yield LinearKernels(library)
    library.set_num_threads(before)


def packed(
    kernels: LinearKernels, format: WeightFormat | str, shape: tuple[int, int], bias: bool = False
) -> PackedWeight:
    extra = noise(shape[0]) if bias else None
    if isinstance(format, WeightFormat):
        return kernels.pack(noise(*shape), format, extra)
    if "zeros" in format:
        found = kernels.pack_grouped(grouped(*shape, 8 if "Q8" in format else 4, torch.arange(shape[1]) // 64), extra)
    elif "order" in format:
        group_of = torch.randint(0, 4, (shape[1],), generator=torch.Generator().manual_seed(0))
        found = kernels.pack_grouped(grouped(*shape, 4, group_of), extra)
    elif format == "Q4_K":
        found = kernels.pack_gguf(q4_k_blocks(*shape), 12, shape[1], extra)
    else:
        blocks = gguf.quants.quantize(noise(*shape).numpy(), gguf.GGMLQuantizationType.Q4_1)
        found = kernels.pack_gguf(torch.from_numpy(blocks), 3, shape[1], extra)
    assert found is not None
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(16, 256), (1, 512), (45, 768), (100, 256)])
def test_products(kernels, format, shape):
    part = packed(kernels, format, shape, bias=shape[0] == 45)
    for rows in ROWS:
        x = noise(rows, shape[1])
        assert_equal_up_to_rounding(run(kernels, [part], x), expected(kernels, part, x)) if rows else None


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16])
@pytest.mark.parametrize("in_features", [1, 2, 7, 33, 161])
def test_odd_numbers_of_input_features(kernels, format, in_features):
    part = kernels.pack(noise(37, in_features), format)
    for rows in (1, 5, 14):
        x = noise(rows, in_features)
        assert_equal_up_to_rounding(run(kernels, [part], x), expected(kernels, part, x))


@pytest.mark.parametrize("format", FORMATS)
def test_more_rows_than_a_block(kernels, format):
    part, x = packed(kernels, format, (70, 256)), noise(401, 256)
    assert_equal_up_to_rounding(run(kernels, [part], x), expected(kernels, part, x))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_its_company(kernels, format):
    part, x = packed(kernels, format, (70, 256)), noise(211, 256)
    together = run(kernels, [part], x)
    for row in (0, 7, 100, 210):
        assert torch.equal(run(kernels, [part], x[row : row + 1]), together[row : row + 1])
    for rows in (2, 4, 7, 12, 13, 29):
        assert torch.equal(run(kernels, [part], x[:rows]), together[:rows])


@pytest.mark.parametrize("format", FORMATS)
def test_results_do_not_depend_on_the_number_of_threads(format):
    for library in LIBRARIES:
        kernels = LinearKernels(library)
        part, x = packed(kernels, format, (200, 512)), noise(130, 512)
        before, results = library.num_threads, []
        for threads in (1, 2, 3):
            library.set_num_threads(threads)
            results.append(run(kernels, [part], x))
        library.set_num_threads(before)
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_parts_of_several_formats_side_by_side(kernels):
    parts = [
        packed(kernels, format, (size, 256), bias=size % 2 == 1)
        for format, size in zip(FORMATS, range(20, 70, 5), strict=True)
    ]
    for rows in (1, 3, 20):
        x = noise(rows, 256)
        alone = [run(kernels, [part], x) for part in parts]
        assert torch.equal(run(kernels, parts, x), torch.cat(alone, 1))


@pytest.mark.parametrize("format", FORMATS)
def test_strides_and_accumulation(kernels, format):
    part = packed(kernels, format, (45, 256), bias=True)
    for rows in (1, 9):
        wide = torch.full((rows, 300), torch.nan)
        x = wide[:, :256]
        x.copy_(noise(rows, 256))
        out = noise(rows, 64)
        before = out.clone()
        run(kernels, [part], x, into=out[:, :45])
        assert torch.equal(out[:, 45:], before[:, 45:])
        assert_equal_up_to_rounding(out[:, :45], expected(kernels, part, x) + before[:, :45].double())


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_inputs(kernels, format):
    part = packed(kernels, format, (20, 256))
    assert torch.equal(run(kernels, [part], torch.zeros(3, 256)).abs(), torch.zeros(3, 20))
    for scale in (1e-30, 1e30):
        x = noise(5, 256) * scale
        found, wanted = run(kernels, [part], x).double() / scale, expected(kernels, part, x) / scale
        assert_equal_up_to_rounding(found, wanted)
    assert run(kernels, [part], torch.full((2, 256), 1e-40)).abs().max() < 1e-36
    for value in (torch.inf, -torch.inf, torch.nan):
        x = noise(3, 256)
        x[1, 5] = value
        found = run(kernels, [part], x)
        assert not found[1].isfinite().any()
        assert found[::2].isfinite().all()


def test_zeros_in_the_middle_are_no_zeros(kernels):
    """The difference from the zero is exact, so both forms give the same bits."""
    for bits in (4, 8):
        some = grouped(40, 128, bits, torch.arange(128) // 32)
        plain, zeros = replace(some, zeros=None), replace(some, zeros=torch.full((40, 4), 1 << bits - 1).byte())
        for rows in (1, 7):
            one, other = (run(kernels, [kernels.pack_grouped(each)], noise(rows, 128)) for each in (plain, zeros))
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_the_largest_codes_do_not_saturate(kernels, name):
    kind = gguf.GGMLQuantizationType[name]
    header = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}[name]
    for code in (0x00, 0x7F, 0x80, 0xFF):
        blocks = torch.full((16, 2, gguf.GGML_QUANT_SIZES[kind][1]), code, dtype=torch.uint8)
        blocks[:, :, :header] = torch.full((16, 2, header // 2), 0.5, dtype=torch.float16).view(torch.uint8)
        part = kernels.pack_gguf(blocks.view(16, -1), int(kind), 64)
        for sign in (1.0, -1.0):
            x = torch.full((3, 64), sign)
            assert_equal_up_to_rounding(run(kernels, [part], x), expected(kernels, part, x))


@pytest.mark.parametrize("format", [WeightFormat.F16, WeightFormat.Q8])
def test_operator(format):
    weight, bias, x = noise(40, 64), noise(40), noise(6, 64)
    linear = NativeMethod(format).prepare(weight, bias)
    assert torch.equal(linear.apply(x), torch.ops.warmroot.linear(x, linear.struct_bytes, 40))
    torch.testing.assert_close(
        linear.apply(x), x @ weight.T + bias, rtol=0, atol=0.5 if format == WeightFormat.Q8 else 0.05
    )
    assert torch.equal(linear.apply(x.bfloat16()), linear.apply(x.bfloat16().float()).bfloat16())
    assert torch.equal(linear.apply(x.T.contiguous().T), linear.apply(x))
    torch.library.opcheck(torch.ops.warmroot.linear, (x, linear.struct_bytes, 40))


def test_parts_of_a_linear():
    x, parts = noise(3, 64), (pack(noise(20, 64), WeightFormat.Q8), pack(noise(12, 64), WeightFormat.F16, noise(12)))
    linear = NativeLinear(parts)
    assert linear.out_features == 32
    assert torch.equal(linear.apply(x), torch.cat([NativeLinear((part,)).apply(x) for part in parts], 1))
