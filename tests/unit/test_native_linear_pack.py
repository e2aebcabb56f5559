"""Packed weights: what goes in comes out, as exactly as the format allows."""

import gguf
import numpy as np
import pytest
import torch
from native_linear_harness import LIBRARIES, noise, q4_k_blocks

from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import LinearKernels, Offsets, WeightFormat, packable_gguf
from warmroot.actors.quantize.grid import fit, grouped
from warmroot.cluster.errors import ConfigError, ModelLoadError

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels")
FLOATS = {WeightFormat.F32: torch.float32, WeightFormat.F16: torch.float16, WeightFormat.BF16: torch.bfloat16}
QUANTISED = [WeightFormat.Q8, WeightFormat.Q4]


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def kernels(request):
    return LinearKernels(request.param)


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("shape", [(16, 32), (1, 1), (17, 5), (70, 33), (4100, 6)])
def test_floats_are_rounded_to_the_format(kernels, format, shape):
    weight = noise(*shape)
    weight[0, 0] = 65520.0 if format is WeightFormat.F16 else -0.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = weight.to(dtype)
        packed = kernels.pack(given, format)
        assert packed.shape == shape
        assert packed.data.data_ptr() % 64 == 0
        assert torch.equal(kernels.unpack(packed), given.to(FLOATS[format]).float())


@pytest.mark.parametrize(("format", "error"), [(WeightFormat.Q8, 0.01), (WeightFormat.Q4, 0.1)])
@pytest.mark.parametrize("shape", [(16, 32), (1, 64), (45, 96)])
def test_quantised_weights_are_close(kernels, format, error, shape):
    weight = noise(*shape, scale=0.02)
    weight[0, :32] = 0.0
    found = kernels.unpack(kernels.pack(weight, format))
    assert torch.equal(found[0, :32], torch.zeros(32))
    assert (found - weight).norm() < error * weight.norm()


def test_eight_bits_are_absmax_per_group(kernels):
    weight = noise(20, 64)
    groups = weight.view(20, 2, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    expected = (groups / scale).round().clamp(-128, 127) * scale
    assert torch.equal(kernels.unpack(kernels.pack(weight, WeightFormat.Q8)), expected.view(20, 64))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_are_as_good_as_a_longer_search(kernels, group):
    """12 shares of a group's range, refined, beside 49; a last group of 160 features may be smaller."""
    weight = noise(64, 160) + 0.3
    blocks = grouped(weight, group)
    searched = fit(blocks, 15, symmetric=False).rounded(blocks).flatten(1)[:, :160]
    packed = kernels.pack(weight, WeightFormat.Q4, group=group)
    assert packed.offsets is Offsets.ZEROS
    assert (kernels.unpack(packed) - weight).norm() < 1.01 * (searched - weight).norm()


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_stay_what_they_are(kernels, name, rows):
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quants.quantize(noise(rows, 96, scale=0.1).numpy(), kind)
    packed = kernels.pack_gguf(torch.from_numpy(blocks), int(kind), 96)
    assert packed.offsets is (Offsets.MINIMA if name == "Q4_1" else Offsets.NONE)
    assert np.array_equal(kernels.unpack(packed).numpy(), gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("rows", [1, 21])
def test_q4_k_scales_are_rounded_to_half(kernels, rows):
    blocks = q4_k_blocks(rows, 512)
    found = kernels.unpack(kernels.pack_gguf(blocks, 12, 512))
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_K))
    # 15 times a scale and a minimum, each rounded to 11 bits.
    bound = 2**-11 * (expected.abs().amax() + 2 * 63 * 0.01)
    assert (found - expected).abs().max() < bound


def test_packing_is_deterministic(kernels):
    weight = noise(17, 96)
    for format in WeightFormat:
        assert torch.equal(kernels.pack(weight, format).data, kernels.pack(weight, format).data)


@pytest.mark.parametrize("format", QUANTISED)
def test_groups_must_divide_the_input(kernels, format):
    with pytest.raises(ConfigError, match="40"):
        kernels.pack(torch.zeros(16, 40), format)


def test_gguf_types(kernels):
    assert [number for number in range(40) if packable_gguf(number)] == [2, 3, 8, 12]
    assert kernels.pack_gguf(torch.zeros(16, 210, dtype=torch.uint8), 14, 256) is None
    with pytest.raises(ModelLoadError, match="96"):
        kernels.pack_gguf(torch.zeros(16, 54, dtype=torch.uint8), 12, 96)
