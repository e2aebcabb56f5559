"""Layers against their formulas, in float64."""

import math

import pytest
import torch

from warmroot.actors.layers.embedding import Embedding
from warmroot.actors.layers.linear import DenseMethod, PackedHalfMethod
from warmroot.actors.layers.mlp import GatedMLP
from warmroot.actors.layers.norm import RMSNorm
from warmroot.actors.layers.rotary import RotaryEmbedding, attention_scale, inverse_frequencies, rotate
from warmroot.actors.parallel.solo import SoloGroup
from warmroot.cluster.model_spec import RopeSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 16)])
def test_rms_norm(shape, plus_one):
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 1e-3, torch.randn(shape[-1])
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + plus_one)
    torch.testing.assert_close(RMSNorm(weight, 1e-6, plus_one=plus_one)(x), expected.float())
    half = RMSNorm(weight, 1e-6, plus_one=plus_one)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected.float(), atol=0.05, rtol=0.02)


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation_is_the_complex_one(rotary_dim):
    torch.manual_seed(0)
    rope, positions = RopeSpec(theta=100.0, rotary_dim=rotary_dim), torch.tensor([0, 1, 77])
    x = torch.randn(3, 2, 16)
    angle = positions[:, None, None].double() * 100.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    half = rotary_dim // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * torch.exp(1j * angle)
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), -1).float()
    found = rotate(x, RotaryEmbedding(rope, CPU).angles(positions, torch.float32))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain = RopeSpec(theta=500000.0, rotary_dim=128)
    scaled = RopeSpec(theta=500000.0, rotary_dim=128, scaling_type="llama3", factor=8.0, original_max_position=8192)
    ratio = inverse_frequencies(plain) / inverse_frequencies(scaled)
    wave = 2 * math.pi / inverse_frequencies(plain)
    assert ratio[wave < 8192 / 4].allclose(torch.tensor(1.0))
    assert ratio[wave > 8192].allclose(torch.tensor(8.0))
    between = ratio[(wave > 8192 / 4) & (wave < 8192)]
    assert len(between) > 0
    assert ((between > 1) & (between < 8)).all()


def test_yarn_scales_attention():
    rope = RopeSpec(rotary_dim=8, scaling_type="yarn", factor=4.0)
    assert attention_scale(rope) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_scale(RopeSpec(rotary_dim=8, scaling_type="yarn", factor=4.0, attention_factor=1.0)) == 1.0


def test_dynamic_rotates_a_position_alike_in_every_sequence():
    rope = RopeSpec(rotary_dim=16, scaling_type="dynamic", factor=2.0, original_max_position=32)
    rotary, plain = RotaryEmbedding(rope, CPU), RotaryEmbedding(RopeSpec(rotary_dim=16), CPU)
    together = rotary.angles(torch.arange(64), torch.float32)
    alone = rotary.angles(torch.tensor([63]), torch.float32)
    assert torch.equal(together[0][63:], alone[0])
    inside = plain.angles(torch.arange(32), torch.float32)
    torch.testing.assert_close(together[1][:32], inside[1], atol=1e-5, rtol=1e-5)
    # Hugging Face's formula for a sequence of 64 tokens.
    base = 10000.0 * (2.0 * 64 / 32 - 1) ** (16 / 14)
    expected = (63.0 * base ** (-torch.arange(0, 16, 2).double() / 16)).sin().float()
    torch.testing.assert_close(together[1][63, 0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not PackedHalfMethod.is_available(), reason="torch without FBGEMM")
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 24)])
def test_packed_half_rounds_weights_only(bias):
    torch.manual_seed(0)
    x, weight = torch.randn(7, 40), torch.randn(24, 40)
    expected = x @ weight.half().float().T + (0 if bias is None else bias)
    torch.testing.assert_close(PackedHalfMethod().prepare(weight, bias).apply(x), expected, atol=1e-5, rtol=1e-5)


def test_gated_mlp():
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    dense = DenseMethod(torch.float32, CPU)
    gate_up = dense.prepare(torch.cat((gate, up)), None)
    for activation, function in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda y: torch.nn.functional.gelu(y, approximate="tanh")),
    ):
        found = GatedMLP(gate_up, dense.prepare(down, None), activation)(x)
        torch.testing.assert_close(found, (function(x @ gate.T) * (x @ up.T)) @ down.T)


def test_embedding_rounds_its_scale_as_gemma_does():
    table = torch.ones(4, 2)
    assert Embedding(table, 2304**0.5, torch.float32, SoloGroup())(torch.tensor([1]))[0, 0] == 48.0
    scaled = Embedding(table.bfloat16(), 2560**0.5, torch.bfloat16, SoloGroup())(torch.tensor([1]))
    assert scaled[0, 0] == torch.tensor(2560**0.5, dtype=torch.bfloat16)
