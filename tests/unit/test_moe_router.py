"""Which experts are chosen, and their weights, by hand."""

import pytest
import torch
from moe_harness import Block, moe_spec, tokens

from warmroot.actors.layers.linear import DenseLinear
from warmroot.actors.layers.moe_router import Router


def route(logits: list[float], correction: list[float] | None = None, **values) -> dict[int, float]:
    """The choice of one token with these logits: weights by expert, best first."""
    gate = DenseLinear(torch.tensor(logits)[:, None], None)
    bias = None if correction is None else torch.tensor(correction)
    experts, weights = Router(moe_spec(num_experts=len(logits), **values), gate, bias)(torch.ones(1, 1))
    assert experts.dtype == torch.int64 and weights.dtype == torch.float32
    return dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))


def close(**by_expert: float):
    return {int(name[1:]): pytest.approx(weight, rel=1e-6) for name, weight in by_expert.items()}


LOG = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().tolist()


def test_weights_are_the_softmax_over_all_experts():
    assert route(LOG) == close(e1=0.4, e2=0.3)


def test_weights_can_be_normalised_and_scaled():
    assert route(LOG, norm_topk_prob=True) == close(e1=4 / 7, e2=3 / 7)
    assert route(LOG, norm_topk_prob=True, routed_scaling_factor=2.5) == close(e1=10 / 7, e2=7.5 / 7)
    assert route(LOG, routed_scaling_factor=16.0) == close(e1=6.4, e2=4.8)


def test_the_best_comes_first():
    assert list(route([0.0, 1.0, 3.0, 2.0], experts_per_token=3)) == [2, 3, 1]


def test_a_correction_steers_the_choice_and_not_the_weights():
    sigmoid = {"scoring": "sigmoid", "correction_bias": True}
    assert route([0.0, 0.0, -9.0, 9.0], [0.0, 0.1, 1.2, -1.0], **sigmoid) == close(
        e2=torch.tensor(-9.0).sigmoid().item(), e1=0.5
    )


def test_a_softmax_group_counts_as_its_best_expert():
    grouped = torch.tensor([0.3, 0.0, 0.2, 0.25, 0.15, 0.1]).clamp(min=1e-9).log().tolist()
    groups = {"n_group": 3, "topk_group": 1}
    assert route(grouped, **groups) == close(e0=0.3, e1=1e-9)
    assert route(grouped, **groups | {"topk_group": 2}) == close(e0=0.3, e3=0.25)


def test_a_sigmoid_group_counts_as_the_sum_of_its_best_two():
    logits = torch.tensor([0.9, 0.1, 0.1, 0.6, 0.6, 0.5]).logit().tolist()
    groups = {"scoring": "sigmoid", "n_group": 2, "topk_group": 1}
    assert sorted(route(logits, **groups)) == [3, 4]
    assert sorted(route(logits, [0.0, 0.3, 0.0, 0.0, 0.0, 0.0], **groups)) == [0, 1]


def test_groups_of_one_expert_are_no_groups():
    logits = [3.0, 1.0, 2.0, 0.0]
    assert route(logits, scoring="sigmoid", n_group=4, topk_group=2) == route(logits, scoring="sigmoid")


def test_half_precision_is_widened_before_the_gate():
    block, x = Block.random(moe_spec()), tokens(9)
    for half in (torch.bfloat16, torch.float16):
        experts, weights = block.router()(x.to(half))
        expected = block.router()(x.to(half).float())
        assert torch.equal(experts, expected[0]) and torch.equal(weights, expected[1])
