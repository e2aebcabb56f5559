"""Norm, gated activation and rotary embedding against float64 formulas, for every instruction set of this machine."""

import pytest
import torch
import torch.nn.functional as F

from warmroot.actors.kernels.library import native, runnable
from warmroot.actors.kernels.pointwise import Pointwise
from warmroot.actors.layers.rotary import RotaryEmbedding
from warmroot.cluster.model_spec import RopeSpec

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels")
SIZES = [1, 2, 7, 16, 31, 63, 64, 65, 100, 128, 576, 1000]
ROWS = [0, 1, 2, 3, 17, 70]
MANY = 300
"""Rows that keep two threads busy."""


@pytest.fixture(
    params=[(library, threads) for library in runnable() for threads in (1, 2)], ids=lambda p: f"{p[0].name}-{p[1]}"
)
def kernels(request):
    library, threads = request.param
    before = library.num_threads
    library.set_num_threads(threads)
    yield Pointwise(library)
    library.set_num_threads(before)


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def strided(x: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """The same values with rows further apart, and NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), torch.nan)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(kernels, size):
    weight = noise(size)
    for rows in ROWS:
        x = noise(rows, size, scale=3.0)
        expected = normed(x, weight, 1e-5).float()
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-7)
        assert torch.equal(kernels.rms_norm(strided(x), weight, 1e-5), kernels.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_and_extremes(kernels):
    weight, heads = noise(64), noise(5, 15, 64)
    expected = normed(heads[:, :12], weight, 1e-6).float()
    torch.testing.assert_close(kernels.rms_norm(heads[:, :12], weight, 1e-6), expected, rtol=2e-6, atol=1e-7)
    assert torch.equal(kernels.rms_norm(torch.zeros(2, 64), weight, 1e-6), torch.zeros(2, 64))
    tiny = noise(3, 64, scale=1e-6)
    torch.testing.assert_close(
        kernels.rms_norm(tiny, weight, 1e-12), normed(tiny, weight, 1e-12).float(), rtol=1e-5, atol=0
    )


def test_rms_norm_accumulates(kernels):
    x, weight, out = noise(9, 100), noise(100), noise(9, 100)
    expected = out + kernels.rms_norm(x, weight, 1e-5)
    kernels._rms_norm(x.data_ptr(), 100, weight.data_ptr(), 1e-5, out.data_ptr(), 100, 9, 100, 1)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_in_place(kernels):
    x, weight = noise(9, 100), noise(100)
    expected = kernels.rms_norm(x, weight, 1e-5)
    kernels._rms_norm(x.data_ptr(), 100, weight.data_ptr(), 1e-5, x.data_ptr(), 100, 9, 100, 0)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", SIZES)
def test_gated(kernels, inner, activation):
    for rows in ROWS:
        gate_up = noise(rows, 2 * inner, scale=3.0)
        gate, up = gate_up.double().chunk(2, 1)
        expected = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        found = kernels.gated(gate_up, activation)
        torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)
        assert torch.equal(kernels.gated(strided(gate_up), activation), found)


@pytest.mark.parametrize("activation", [torch.nn.SiLU(), torch.nn.GELU(approximate="tanh")], ids=["silu", "gelu_tanh"])
def test_gated_of_large_and_small_gates(kernels, activation):
    name = "silu" if isinstance(activation, torch.nn.SiLU) else "gelu_tanh"
    gate = torch.tensor([[-1e30, -1e4, -100.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 1e4, 1e30]])
    found = kernels.gated(torch.cat((gate, torch.ones_like(gate)), 1), name)
    torch.testing.assert_close(found[:, 2:], activation(gate.double()).float()[:, 2:], rtol=2e-6, atol=1e-6)
    # Where exp is held at its largest, what is left is nothing beside the gate.
    assert (found[:, :2].abs() <= 1e-8).all()


@pytest.mark.parametrize(
    "head_dim, rotary_dim", [(64, 64), (64, 32), (80, 80), (128, 128), (16, 16), (6, 6), (10, 2), (100, 50)]
)
def test_rotary(kernels, head_dim, rotary_dim):
    half = rotary_dim // 2
    rope = RotaryEmbedding(RopeSpec(theta=100.0, rotary_dim=rotary_dim), torch.device("cpu"))
    for rows in (1, 3, 70):
        qkv = noise(rows, 7, head_dim)
        cos, sin = rope.rows(torch.arange(rows) * 3)
        left, right = qkv[:, :5, :half].double(), qkv[:, :5, half:rotary_dim].double()
        c, s = cos[:, None].double(), sin[:, None].double()
        expected = qkv.clone()
        expected[:, :5, :half] = (left * c - right * s).float()
        expected[:, :5, half:rotary_dim] = (right * c + left * s).float()
        kernels.rotary(qkv[:, :5], cos, sin)
        torch.testing.assert_close(qkv, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 100, 6])
def test_rotary_with_norms_of_heads(kernels, head_dim):
    """Three query and two key heads; the two value heads stay."""
    rows, half = 11, head_dim // 2
    rope = RotaryEmbedding(RopeSpec(theta=100.0, rotary_dim=head_dim), torch.device("cpu"))
    qkv, q_norm, k_norm = noise(rows, 7, head_dim), noise(head_dim), noise(head_dim, scale=2.0)
    cos, sin = rope.rows(torch.arange(rows))
    expected = qkv.clone()
    expected[:, :3] = normed(qkv[:, :3], q_norm, 1e-6).float()
    expected[:, 3:5] = normed(qkv[:, 3:5], k_norm, 1e-6).float()
    kernels.rotary(expected[:, :5], cos, sin)
    kernels._rotary(
        *(qkv.data_ptr(), qkv.stride(0), rows, 3, 2, head_dim, q_norm.data_ptr(), k_norm.data_ptr(), 1e-6),
        *(cos.data_ptr(), sin.data_ptr(), 2 * half),
    )
    torch.testing.assert_close(qkv, expected, rtol=2e-6, atol=2e-6)


def test_a_row_does_not_depend_on_its_batch(kernels):
    weight, x, gate_up = noise(576), noise(MANY, 576), noise(MANY, 2 * 577)
    rope = RotaryEmbedding(RopeSpec(rotary_dim=64), torch.device("cpu"))
    qk = noise(MANY, 9, 64)
    cos, sin = rope.rows(torch.arange(MANY))
    turned = qk.clone()
    kernels.rotary(turned, cos, sin)
    together = kernels.rms_norm(x, weight, 1e-5), kernels.gated(gate_up, "silu")
    for row in range(0, MANY, 7):
        one = slice(row, row + 1)
        assert torch.equal(kernels.rms_norm(x[one], weight, 1e-5), together[0][one])
        assert torch.equal(kernels.gated(gate_up[one], "silu"), together[1][one])
        alone = qk[one].clone()
        kernels.rotary(alone, cos[one], sin[one])
        assert torch.equal(alone, turned[one])


def test_operators_agree_with_their_shapes():
    """The operators are registered, and what a compiler is told of them is true."""
    checks = ("test_schema", "test_faketensor")
    ops, x, weight = torch.ops.warmroot, noise(3, 8, 16), noise(16)
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5), test_utils=checks)
    torch.library.opcheck(ops.gated.default, (noise(3, 16), "silu"), test_utils=checks)
    torch.library.opcheck(ops.rotary.default, (x, noise(3, 8), noise(3, 8)), test_utils=checks)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn", "dynamic"])
def test_table_of_angles_is_exact(scaling):
    options = {} if scaling == "none" else {"scaling_type": scaling, "factor": 4.0, "original_max_position": 64}
    rotary = RotaryEmbedding(RopeSpec(rotary_dim=16, **options), torch.device("cpu"))
    for positions in (torch.tensor([5, 0, 5]), torch.tensor([3000, 1023]), torch.arange(1500, 1601)):
        cos, sin = rotary.rows(positions)
        full_cos, full_sin = rotary.angles(positions, torch.float32)
        assert torch.equal(torch.cat((cos, cos), 1), full_cos[:, 0])
        assert torch.equal(sin, full_sin[:, 0])
        assert cos.is_contiguous() and sin.is_contiguous()
    table = rotary.table(100)
    assert table is rotary.table(3001), "a longer table serves shorter contexts too"
    assert len(table[0]) >= 3001
    assert [part.shape for part in rotary.rows(torch.arange(0))] == [(0, 8), (0, 8)]
