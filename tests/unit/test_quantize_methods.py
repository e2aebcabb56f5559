"""Grids, GPTQ and AWQ on matrices whose answer is known or can be computed another way."""

import pytest
import torch

from warmroot.actors.quantize.awq import InputMoments, awq_round, awq_scales, shared_size
from warmroot.actors.quantize.gptq import gptq
from warmroot.actors.quantize.grid import fit, grouped, whole_range
from warmroot.actors.quantize.quantised import output_error, round_to_grid
from warmroot.actors.quantize.settings import QuantizeSettings
from warmroot.cluster.errors import ConfigError


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(count, size):
    """Correlated, with a few loud channels."""
    mixed = normal(count, size) @ (torch.eye(size) + 0.3 * normal(size, size, seed=1))
    mixed[:, ::11] *= 8
    return mixed


def moments(x):
    return InputMoments(x.t() @ x / len(x), x.abs().mean(0))


def settings(method="gptq", **values):
    return QuantizeSettings(method=method, **{"group_size": 32} | values)


def test_weights_on_a_grid_are_found_exactly():
    codes = torch.tensor([0, 15, *range(1, 15), *range(16)]).float()
    weight = (codes - 5).mul(0.125).expand(3, 2, 32)
    grid = fit(weight, 15, symmetric=False)
    assert (grid.zeros == 5).all() and (grid.scales == 0.125).all()
    assert torch.equal(grid.rounded(weight), weight)


def test_scales_are_float16_and_zero_points_never_zero():
    weight = normal(8, 4, 32).abs()
    grid = fit(weight, 15, symmetric=False)
    assert torch.equal(grid.scales.half().float(), grid.scales)
    assert grid.zeros.min() == 1 and grid.zeros.max() <= 15


def test_groups_of_zeros_stay_zeros():
    weight = torch.zeros(2, 1, 32)
    assert torch.equal(fit(weight, 15, symmetric=False).rounded(weight), weight)


@pytest.mark.parametrize("importance", [None, "inputs", "moments"])
def test_the_search_is_never_worse_than_the_whole_range(importance):
    weight = normal(16, 3, 32)
    x = inputs(500, 96)
    gram = moments(x).gram
    blocks = torch.stack([gram[i : i + 32, i : i + 32] for i in (0, 32, 64)])
    weights = {None: None, "inputs": gram.diagonal().view(3, 32), "moments": blocks}[importance]
    error = {}
    plain = whole_range(weight, 15, symmetric=False)
    for name, grid in (("plain", plain), ("searched", fit(weight, 15, symmetric=False, importance=weights))):
        difference = grid.rounded(weight) - weight
        by_input = torch.eye(32).expand(3, 32, 32)
        if importance == "inputs":
            by_input = torch.stack([row.diag() for row in weights])
        elif importance == "moments":
            by_input = blocks
        error[name] = torch.einsum("ogi,gij,ogj->og", difference, by_input, difference)
    assert (error["searched"] <= error["plain"] * (1 + 1e-5)).all()
    assert error["searched"].sum() < 0.97 * error["plain"].sum()


def test_a_last_group_may_be_short():
    weight = normal(4, 80)
    blocks = grouped(weight, 32)
    assert blocks.shape == (4, 3, 32) and (blocks[:, 2, 16:] == 0).all()
    found = round_to_grid(weight, fit(blocks, 255, symmetric=False), 32)
    assert found.groups.tolist() == [0] * 32 + [1] * 32 + [2] * 16
    torch.testing.assert_close(found.weight(), weight, atol=0.02, rtol=0)


def optimal_brain(weight, gram, damping, grid, group_of):
    """GPTQ as its predecessor states it (OBQ in fixed order): the inverse Hessian loses a row and column each time."""
    weight, hessian = weight.double().clone(), gram.double().clone()
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    codes = torch.empty_like(weight)
    for column in range(weight.shape[1]):
        inverse = hessian[column:, column:].inverse()
        scale, zero = grid.scales[:, group_of[column]].double(), grid.zeros[:, group_of[column]].double()
        codes[:, column] = (weight[:, column] / scale + zero).round().clamp(0, grid.max_code)
        error = weight[:, column] - (codes[:, column] - zero) * scale
        weight[:, column:] -= error[:, None] * inverse[0] / inverse[0, 0]
    return codes


def test_gptq_is_optimal_brain_quantisation_in_fixed_order():
    weight, gram = normal(12, 160), moments(inputs(400, 160)).gram
    found = gptq(weight, gram, settings(act_order="static"))
    order = gram.diagonal().argsort(descending=True, stable=True)
    importance = gram.diagonal().view(5, 32)
    grid = fit(grouped(weight, 32), 15, symmetric=False, importance=importance)
    wanted = optimal_brain(weight[:, order], gram[order][:, order], 0.01, grid, (order // 32).tolist())
    same = found.codes[:, order] == wanted
    assert same.float().mean() > 0.995  # what lies between two codes may fall either way in float32
    assert torch.equal(found.grid.scales, grid.scales)


@pytest.mark.parametrize("order", ["none", "static", "dynamic"])
@pytest.mark.parametrize("size", [-1, 32, 64])
def test_gptq_loses_less_output_than_rounding(order, size):
    weight, gram = normal(48, 160), moments(inputs(600, 160)).gram
    chosen = settings(group_size=size, act_order=order)
    width = chosen.group_of(160)
    rounded = round_to_grid(weight, fit(grouped(weight, width), 15, symmetric=False), width)
    found = gptq(weight, gram, chosen)
    assert output_error(found.weight() - weight, gram) < 0.5 * output_error(rounded.weight() - weight, gram)
    counts = found.groups.bincount().tolist()
    assert counts == ([160] if size == -1 else [32] * 5 if size == 32 else [64, 64, 32])
    if order == "dynamic" and size != -1:
        assert found.groups.tolist() != sorted(found.groups.tolist())
        loudest = gram.diagonal().argsort(descending=True)[:size]
        assert (found.groups[loudest] == 0).all()
    else:
        assert found.groups.tolist() == sorted(found.groups.tolist())


def test_gptq_without_inputs_is_rounding():
    weight = normal(8, 64)
    found = gptq(weight, torch.zeros(64, 64), settings(act_order="none"))
    assert torch.equal(found.codes, round_to_grid(weight, found.grid, 32).codes)


def test_gptq_with_inputs_that_never_come():
    weight, gram = normal(8, 64), moments(inputs(300, 64)).gram
    gram[5], gram[:, 5] = 0, 0
    found = gptq(weight, gram, settings())
    assert found.weight().isfinite().all()
    assert (found.weight()[:, 5] - weight[:, 5]).abs().max() < 0.4


def test_symmetric_codes_have_their_zero_in_the_middle():
    found = gptq(normal(8, 64), torch.eye(64), settings(symmetric=True, bits=8))
    assert (found.grid.zeros == 128).all()


def test_awq_protects_loud_inputs():
    weight, seen = normal(32, 96), moments(inputs(500, 96))
    chosen = settings("awq")
    scales = awq_scales(weight, seen, chosen)
    assert scales[::11].mean() > 1.5 * scales[1::11].mean()
    gram = seen.gram / (scales * scales[:, None])
    scaled = awq_round(weight * scales, gram, chosen)
    plain = round_to_grid(weight, fit(grouped(weight, 32), 15, symmetric=False), 32)
    ours = output_error(scaled.weight() / scales - weight, seen.gram)
    assert ours < 0.6 * output_error(plain.weight() - weight, seen.gram)


def test_heads_that_share_values_share_scales():
    shared = shared_size(torch.arange(8.0), num_kv_heads=2, head_dim=2)
    assert shared.tolist() == [1.0, 2.0, 1.0, 2.0, 5.0, 6.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "gguf"}, "--method: 'gguf' is not one of rtn, gptq, awq"),
        ({"method": "gptq", "bits": 3}, "--bits: 3 is not one of 4, 8"),
        ({"method": "gptq", "group_size": 48}, "--group-size: 48 is not one of -1, 32, 64, 128"),
        ({"method": "gptq", "act_order": "random"}, "--act-order: 'random' is not one of none, static, dynamic"),
        (
            {"method": "rtn", "act_order": "static"},
            "--act-order: not with --method rtn; only for gptq, which rounds column by column",
        ),
        (
            {"method": "awq", "bits": 8},
            "--bits 8: not with --method awq; only for rtn and gptq; AWQ's layout holds 4 bits",
        ),
        (
            {"method": "awq", "symmetric": True},
            "--symmetric: not with --method awq; only for rtn and gptq; AWQ's kernels read zero points",
        ),
        ({"method": "gptq", "damping": 0.0}, "--damping: should be between 0 and 1, not 0"),
    ],
)
def test_settings_that_do_not_go_together(values, message):
    with pytest.raises(ConfigError) as caught:
        QuantizeSettings(**values)
    assert caught.value.message == message


def test_shapes_that_a_layout_cannot_hold():
    with pytest.raises(ConfigError, match="AWQ's layout cannot cut into groups of 128; use -1 or 32 or 64, or"):
        QuantizeSettings(method="awq").check_shape("x.q_proj", 576, 576)
    with pytest.raises(ConfigError, match=r"x.k_proj is \[36, 576\]; both must be multiples of 8"):
        QuantizeSettings(method="gptq").check_shape("x.k_proj", 36, 576)
    QuantizeSettings(method="gptq").check_shape("x.q_proj", 576, 576)
