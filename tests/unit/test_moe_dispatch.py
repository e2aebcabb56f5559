"""Tokens that travel to their experts, between ranks that are threads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_harness import Block, RowByRow, ThreadGroup, moe_spec, run_ranks, tokens

from warmroot.actors.layers.mlp import GatedMLP
from warmroot.actors.layers.moe_router import Router
from warmroot.cluster.expert_moves import plan_rebalance
from warmroot.cluster.expert_placement import ExpertPlacement, initial_placement
from warmroot.cluster.topology import Topology

SHARED = {"shared_intermediate_size": 20, "shared_gate": True}


def exchange(
    block: Block, topology: Topology, counts: list[int], placement: ExpertPlacement | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[ThreadGroup], list[list[int]]]:
    """One call on every rank, dp group i having counts[i] tokens.

    Returns input and summed output of each dp group, every rank's group, and every rank's loads.
    """
    inputs = [tokens(count, seed=10 + group) for group, count in enumerate(counts)]

    def body(rank: int, group: ThreadGroup) -> tuple:
        mlp = block.rank(topology, rank, group, placement)
        return mlp(inputs[topology.place(rank).dp_rank]), group, mlp.take_loads().tolist()

    outputs, groups, loads = zip(*run_ranks(topology.ep, body), strict=True)
    summed = [torch.stack(outputs[first : first + topology.tp]).sum(0) for first in range(0, topology.ep, topology.tp)]
    return inputs, summed, list(groups), list(loads)


CASES = [
    (1, 2, 0, [9, 4]),
    (1, 2, 0, [0, 5]),
    (1, 2, 0, [0, 0]),
    (1, 2, 4, [7, 7]),
    (1, 4, 0, [9, 1, 0, 30]),
    (1, 4, 8, [6, 5, 4, 3]),
    (2, 4, 0, [9, 4]),
    (2, 4, 4, [1, 0]),
    (2, 8, 8, [5, 0, 2, 11]),
]


@pytest.mark.parametrize(("tp", "ep", "num_redundant", "counts"), CASES)
@pytest.mark.parametrize("values", [{}, SHARED])
def test_every_group_gets_its_tokens_back(tp, ep, num_redundant, counts, values):
    block = Block.random(moe_spec(experts_per_token=3, **values))
    inputs, outputs, _, loads = exchange(block, Topology(tp=tp, ep=ep), counts, initial_placement(8, ep, num_redundant))
    for x, out in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(out, block.reference(x), rtol=1e-5, atol=2e-6)
    chosen = block.router()(torch.cat(inputs))[0]
    assert torch.tensor(loads).sum(0).tolist() == chosen.flatten().bincount(minlength=8).tolist()


def test_a_token_travels_once_to_each_rank_that_it_needs():
    block, topology, counts = Block.random(moe_spec(experts_per_token=3)), Topology(ep=4), [9, 1, 0, 30]
    inputs, _, groups, _ = exchange(block, topology, counts)
    for receiver, group in enumerate(groups):
        there, back = group.received
        for sender, x in enumerate(inputs):
            ranks = [set(chosen) for chosen in (block.router()(x)[0] // 2).tolist()]
            assert there[sender] == sum(receiver in reached for reached in ranks)
            assert back[sender] == groups[sender].received[0][receiver]


def test_the_shared_expert_works_while_tokens_travel():
    block, topology = Block.random(moe_spec(**SHARED)), Topology(ep=2)

    def body(rank: int, group: ThreadGroup) -> list[str]:
        mlp = block.rank(topology, rank, group)
        shared = mlp._shared
        mlp._shared = lambda x: group.log.append("shared") or shared(x)
        mlp(tokens(5))
        return group.log

    expected = ["counts", "start", "shared", "wait", "start", "wait"]
    assert run_ranks(2, body) == [expected, expected]


HOT = torch.tensor([10.0] + [0.0] * 7)
COPIED = ExpertPlacement(8, ((0, 1, 2), (0, 3, 4), (0, 5, 6), (0, 7, 1)))
"""Expert 0 is on all four ranks."""


@pytest.mark.parametrize("count", [1, 16])
def test_copies_of_a_hot_expert_share_its_tokens(count):
    """Also where each rank has one token."""
    block, topology = replace(Block.random(moe_spec(experts_per_token=1)), correction=HOT), Topology(ep=4)
    _, alone, groups, _ = exchange(block, topology, [count] * 4)
    assert [sum(group.received[0]) for group in groups] == [4 * count, 0, 0, 0]
    inputs, shared, groups, _ = exchange(block, topology, [count] * 4, COPIED)
    assert [sum(group.received[0]) for group in groups] == [count] * 4
    for x, out, other in zip(inputs, shared, alone, strict=True):
        torch.testing.assert_close(out, block.reference(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-6)


class Counting:
    """An expert that counts its tokens."""

    def __init__(self, mlp: GatedMLP) -> None:
        self.mlp = mlp
        self.rows = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return self.mlp(x)


def test_a_rebalance_by_counted_loads_evens_out_the_ranks():
    """Placed by the loads of one batch, measured with another: from 1.8 times the mean to less than 1.15."""
    skew = -4.0 * torch.arange(1, 33).log()
    block = Block.random(moe_spec(num_experts=32, experts_per_token=2))
    topology, placement = Topology(ep=4), initial_placement(32, 4, 16)

    def step(rank: int, group: ThreadGroup, placement: ExpertPlacement, seed: int) -> tuple[int, np.ndarray]:
        mlp = block.rank(topology, rank, group, placement)
        mlp._router = Skewed(block.router(), skew)
        experts = [Counting(expert) for expert in block.held(placement, topology, rank)]
        mlp.place(placement, experts)
        mlp(tokens(500, seed=seed + rank))
        return sum(expert.rows for expert in experts), mlp.take_loads()

    def measure(placement: ExpertPlacement, seed: int) -> tuple[float, np.ndarray]:
        work, loads = zip(*run_ranks(4, lambda rank, group: step(rank, group, placement, seed)), strict=True)
        assert sum(work) == 4 * 500 * 2
        return max(work) * 4 / sum(work), sum(loads)

    before, loads = measure(placement, 20)
    plan = plan_rebalance(placement, loads.tolist())
    assert plan is not None
    after, _ = measure(plan.placement, 30)
    assert before > 1.5 and after <= 1.15, (before, after)


class Skewed:
    """A router whose logits have something added."""

    def __init__(self, router: Router, skew: torch.Tensor) -> None:
        self.router = replace(router, gate=self)
        self.gate = router.gate
        self.skew = skew

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate.apply(x) + self.skew

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.router(x)


def test_bits_do_not_depend_on_what_other_ranks_send():
    block, topology = Block.random(moe_spec(experts_per_token=3, **SHARED)), Topology(ep=2)

    def first_rank(count: int, others: int) -> torch.Tensor:
        def body(rank: int, group: ThreadGroup) -> torch.Tensor:
            return block.rank(topology, rank, group, method=RowByRow())(tokens(others if rank else count))

        return run_ranks(2, body)[0]

    alone = first_rank(6, 0)
    assert torch.equal(first_rank(6, 31), alone)
    assert torch.equal(first_rank(2, 31), alone[:2])


def test_half_precision_travels_as_it_is():
    block = Block.random(moe_spec())

    def body(rank: int, group: ThreadGroup) -> torch.Tensor:
        mlp = block.rank(Topology(ep=2), rank, group)
        sizes: list[int] = []
        send = group.all_to_all
        group.all_to_all = lambda rows, *rest: sizes.append(rows[:1].nbytes) or send(rows, *rest)
        start = mlp._dispatch.start
        experts, weights = block.router()(tokens(7))
        out = start(Widened(mlp._experts), tokens(7).bfloat16(), mlp._copies(experts), weights)()
        assert sizes == [24 * 2 + 2 * 8, 24 * 2]
        return out

    class Widened:
        """Experts of float32 weights for tokens of bfloat16."""

        def __init__(self, experts) -> None:
            self._experts = experts
            self.mlps = experts.mlps

        def __call__(self, x, copies, weights):
            assert x.dtype == torch.bfloat16
            return self._experts(x.float(), copies, weights).to(x.dtype)

    for out in run_ranks(2, body):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), block.reference(tokens(7).bfloat16().float()), rtol=5e-2, atol=5e-2)
