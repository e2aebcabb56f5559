"""A sparse layer on one rank, and cut over ranks that all see the same tokens."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from moe_harness import FLOATS, Block, RowByRow, moe_spec, tokens

from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import NativeMethod, WeightFormat
from warmroot.actors.layers.linear import Linear
from warmroot.cluster.expert_placement import initial_placement
from warmroot.cluster.topology import Topology

SHARED = {"shared_intermediate_size": 20, "shared_gate": True}
needs_native = pytest.mark.skipif(native() is None, reason="no native library")


def hot(block: Block, *experts: int) -> Block:
    """All tokens go to these experts, whatever they are."""
    return replace(block, correction=torch.zeros(len(block.gate)).index_fill(0, torch.tensor(experts), 10.0))


@pytest.mark.parametrize("count", [0, 1, 2, 33])
@pytest.mark.parametrize("values", [{}, SHARED, {"experts_per_token": 8}, {"experts_per_token": 1}])
def test_the_block_is_the_weighted_sum_of_its_experts(count, values):
    block = Block.random(moe_spec(**values))
    x = tokens(count)
    before = x.clone()
    out = block.rank()(x)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out, block.reference(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_experts_without_tokens_do_nothing():
    block = hot(Block.random(moe_spec()), 3, 6)
    x = tokens(17)
    mlp = block.rank()
    torch.testing.assert_close(mlp(x), block.reference(x), rtol=1e-5, atol=1e-6)
    assert mlp.take_loads().tolist() == [0, 0, 0, 17, 0, 0, 17, 0]


def test_loads_are_counted_until_they_are_taken():
    block = Block.random(moe_spec(experts_per_token=3))
    mlp = block.rank()
    mlp(tokens(5, seed=1))
    mlp(tokens(4, seed=2))
    loads = mlp.take_loads()
    chosen = torch.cat([block.router()(tokens(5, seed=1))[0], block.router()(tokens(4, seed=2))[0]])
    assert loads.dtype == np.int64
    assert loads.tolist() == chosen.flatten().bincount(minlength=8).tolist()
    assert mlp.take_loads().tolist() == [0] * 8


def test_bits_do_not_depend_on_the_other_tokens():
    block = Block.random(moe_spec(experts_per_token=3, **SHARED))
    mlp, x = block.rank(method=RowByRow()), tokens(40)
    whole = mlp(x)
    for start, stop in ((0, 1), (7, 8), (5, 25), (39, 40)):
        assert torch.equal(mlp(x[start:stop]), whole[start:stop])
    assert torch.equal(mlp(x.flip(0)).flip(0), whole)


def test_a_bad_token_stays_alone():
    block, x = Block.random(moe_spec()), tokens(6)
    x[2] = torch.nan
    out = block.rank()(x)
    others = [0, 1, 3, 4, 5]
    assert out[2].isnan().all()
    torch.testing.assert_close(out[others], block.reference(x[others]), rtol=1e-5, atol=1e-6)


def test_half_precision_rounds_once():
    block, x = Block.random(moe_spec(), hidden=32), tokens(9, hidden=32).bfloat16()

    class Half:
        def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            return HalfLinear(FLOATS.prepare(weight, bias))

    @dataclass(frozen=True)
    class HalfLinear:
        inner: Linear

        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.apply(x.float()).to(x.dtype)

    out = block.rank(method=Half())(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), block.reference(x.float()), rtol=4e-2, atol=4e-2)


@needs_native
@pytest.mark.parametrize(("form", "off"), [(WeightFormat.F32, 1e-5), (WeightFormat.F16, 2e-3), (WeightFormat.Q8, 5e-2)])
def test_packed_weights_work(form, off):
    spec = moe_spec(intermediate_size=32, shared_intermediate_size=32, shared_gate=True)
    block, x = Block.random(spec, hidden=64), tokens(21, hidden=64)
    mlp = block.rank(method=NativeMethod(form))
    # Only the experts' weights are rounded: the gate must choose as the reference does.
    mlp._router = block.router()
    torch.testing.assert_close(mlp(x), block.reference(x), rtol=off, atol=off)


CUTS = [(1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 2, 0), (4, 4, 0), (2, 2, 2), (4, 4, 8), (4, 2, 6)]


@pytest.mark.parametrize(("tp", "ep", "num_redundant"), CUTS)
def test_the_ranks_of_a_tp_group_add_up_to_the_whole(tp, ep, num_redundant):
    block, x = Block.random(moe_spec(**SHARED)), tokens(23)
    placement = initial_placement(8, ep, num_redundant)
    ranks = [block.rank(Topology(tp=tp, ep=ep), rank, placement=placement) for rank in range(tp)]
    total = torch.stack([rank(x) for rank in ranks]).sum(0)
    torch.testing.assert_close(total, block.reference(x), rtol=1e-5, atol=2e-6)
    expected = block.router()(x)[0].flatten().bincount(minlength=8).tolist()
    for rank in ranks:
        assert rank.take_loads().tolist() == expected


def test_copies_take_turns():
    """Both ranks have expert 0; only rank 1 has expert 7. Expert 0's tokens are shared, by even and odd."""
    block, x = hot(Block.random(moe_spec()), 0, 7), tokens(10)
    placement = initial_placement(8, 2, 2)
    assert placement.slots == ((0, 1, 2, 3, 4), (5, 6, 7, 0, 1))
    topology = Topology(tp=2, ep=2)
    first, second = (block.rank(topology, rank, placement=placement)(x) for rank in range(2))
    torch.testing.assert_close(first + second, block.reference(x), rtol=1e-5, atol=1e-6)
    assert (first[1::2] == 0).all() and (first[::2] != 0).any(1).all()


def test_a_placement_can_be_changed_between_calls():
    block, x, topology = Block.random(moe_spec()), tokens(12), Topology(tp=2, ep=2)
    ranks = [block.rank(topology, rank) for rank in range(2)]
    expected = block.reference(x)
    for placement in (initial_placement(8, 2, 2), initial_placement(8, 2, 8), initial_placement(8, 2)):
        for rank, mlp in enumerate(ranks):
            mlp.place(placement, block.held(placement, topology, rank))
        torch.testing.assert_close(ranks[0](x) + ranks[1](x), expected, rtol=1e-5, atol=1e-6)
