"""Experts that move between ranks while they serve."""

from dataclasses import replace

import pytest
import torch
from moe_harness import FLOATS, Block, ThreadGroup, moe_spec, run_ranks, tokens

from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import NativeMethod, WeightFormat
from warmroot.actors.kernels.tuning import ChoosingLinear, LinearChoice
from warmroot.actors.layers.linear import DenseMethod
from warmroot.actors.layers.mlp import GatedMLP
from warmroot.actors.layers.moe_balance import ExpertBalancer, move_experts
from warmroot.actors.models.on_load import QuantisingMethod
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.expert_moves import plan_moves
from warmroot.cluster.expert_placement import ExpertPlacement, initial_placement
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
METHODS = {
    "float32": FLOATS,
    "bfloat16": DenseMethod(torch.bfloat16, CPU),
    "int4 by torch": QuantisingMethod(4, 32, CPU),
}
if native() is not None:
    METHODS |= {name: NativeMethod(WeightFormat[name]) for name in ("F16", "Q8")}


@pytest.mark.parametrize("method", METHODS)
def test_moved_experts_are_the_same_to_the_bit(method):
    spec = moe_spec(num_experts=6, intermediate_size=32)
    block, topology = Block.random(spec, hidden=64), Topology(ep=3)
    old = ExpertPlacement(6, ((0, 1, 2), (2, 3, 4), (4, 5, 0)))
    new = ExpertPlacement(6, ((3, 1, 5), (2, 3, 0), (4, 2, 1)))
    moves = plan_moves(old, new)
    x = tokens(5, hidden=64).to(torch.bfloat16 if method == "bfloat16" else torch.float32)

    def body(rank: int, group: ThreadGroup) -> None:
        before = block.held(old, topology, rank, METHODS[method])
        after = move_experts(moves, before, group)
        moved = {move.target_slot for move in moves if move.target == rank}
        for slot, expert in enumerate(new.slots[rank]):
            assert (after[slot] is before[slot]) == (slot not in moved)
            assert torch.equal(after[slot](x), block.expert(expert, method=METHODS[method])(x))

    run_ranks(3, body)


@pytest.mark.skipif(native() is None, reason="no native library")
def test_copies_for_a_second_kernel_stay_behind():
    block = Block.random(moe_spec(num_experts=2))
    own = block.expert(0, method=NativeMethod(WeightFormat.F16))
    both = [ChoosingLinear(linear, linear, LinearChoice()) for linear in (own.gate_up, own.down)]
    move = plan_moves(ExpertPlacement(2, ((0, 1),)), ExpertPlacement(2, ((1, 0),)))

    def body(rank: int, group: ThreadGroup) -> list[GatedMLP]:
        return move_experts(move, [GatedMLP(*both, "silu"), own], group)

    assert [type(mlp.down) for mlp in run_ranks(1, body)[0]] == [type(own.down)] * 2


def test_what_cannot_be_sent_is_named():
    mlp = GatedMLP(METHODS, METHODS, "silu")
    with pytest.raises(ConfigError, match="dict cannot be sent"):
        move_experts([], [mlp], ThreadGroup.__new__(ThreadGroup))


@pytest.mark.parametrize("topology", [Topology(ep=4), Topology(tp=4, ep=4)], ids=["exchange", "local"])
def test_skewed_loads_become_even_while_the_ranks_serve(topology):
    """32 experts, a few of which have most of the work, 16 copies: max / mean load of the ranks falls below 1.15."""
    block = Block.random(moe_spec(num_experts=32, experts_per_token=2))
    block = replace(block, correction=0.6 / torch.arange(1, 33), gate=0.5 * block.gate)
    placement, is_local = initial_placement(32, 4, 16), topology.attention_dp == 1

    def body(rank: int, group: ThreadGroup) -> list[int]:
        mlp = block.rank(topology, rank, group, placement)
        balancer, work = ExpertBalancer({7: mlp}, group, period=2), []
        for step in range(8):
            x = tokens(400, seed=100 * step + (0 if is_local else rank))
            before = mlp.num_rows
            out = mlp(x)
            if not is_local and step in (0, 7):
                torch.testing.assert_close(out[:20], block.reference(x[:20]), rtol=1e-5, atol=2e-6)
            work.append(mlp.num_rows - before)
            balancer.after_step()
        (found,) = balancer.balances
        assert found.layer == 7 and found.num_moves > 0
        assert found.imbalance_at_start > 1.5 and found.imbalance <= 1.1
        return work

    work = torch.tensor(run_ranks(4, body))
    imbalance = (work.max(0).values * 4 / work.sum(0)).tolist()
    assert imbalance[0] > 1.5, imbalance
    assert max(imbalance[4:]) <= 1.15, imbalance


def test_few_tokens_move_nothing():
    """Chance alone would: 8 tokens on 32 experts."""
    block, topology = Block.random(moe_spec(num_experts=32)), Topology(ep=2)

    def body(rank: int, group: ThreadGroup) -> None:
        mlp = block.rank(topology, rank, group)
        balancer = ExpertBalancer({0: mlp}, group)
        mlp(tokens(4, seed=rank))
        assert balancer.balance(0) is None
        (found,) = balancer.balances
        assert sum(found.loads) == 16 and found.num_moves == 0 and found.imbalance == found.imbalance_at_start

    run_ranks(2, body)


def test_a_layer_is_looked_at_every_period():
    block, topology = Block.random(moe_spec()), Topology(ep=2)

    def body(rank: int, group: ThreadGroup) -> list[int]:
        layers = {number: block.rank(topology, rank, group) for number in (0, 2, 5)}
        balancer = ExpertBalancer(layers, group, period=2)
        seen: list[int] = []
        balancer.balance = seen.append
        for _ in range(13):
            balancer.after_step()
        return seen

    assert run_ranks(2, body) == [[1, 2, 0, 1, 2, 0]] * 2
