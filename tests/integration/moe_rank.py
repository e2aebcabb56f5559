"""One rank of an expert parallel group as a process of its own: ``moe_rank.py RANK SIZE TP STORE_PORT``."""

import sys

import torch
from layout_models import model
from moe_harness import Block, moe_spec, tokens

from warmroot.actors.layers.moe_balance import ExpertBalancer, move_experts
from warmroot.actors.parallel.groups import RankLists, make_groups
from warmroot.actors.parallel.rendezvous import join_store
from warmroot.cluster.expert_moves import plan_moves
from warmroot.cluster.expert_placement import ExpertPlacement, initial_placement
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.step_traffic import exchange_bytes
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
REDUNDANT = 4


def main(rank: int, topology: Topology, port: int) -> None:
    moe = moe_spec(experts_per_token=3, shared_intermediate_size=20, shared_gate=True)
    groups = make_groups(
        rank,
        RankLists.of(topology, rank),
        join_store("127.0.0.1", port, 60.0),
        address="127.0.0.1",
        device=CPU,
        library=None,
        deadline_s=60.0,
    )
    block, placement = Block.random(moe), initial_placement(8, topology.ep, REDUNDANT)
    mlp = block.rank(topology, rank, groups.ep, placement)
    spec = model(architecture="qwen2_moe", num_layers=1, hidden_size=24, moe=moe)
    layout = ParallelLayout.of(spec, topology, num_redundant_experts=REDUNDANT)
    for dp_counts in ([11, 5, 0, 3], [0, 0, 0, 0], [1, 0, 0, 40], [64, 64, 64, 64]):
        inputs = [tokens(count, seed=group) for group, count in enumerate(dp_counts[: topology.attention_dp])]
        x = inputs[topology.place(rank).dp_rank]
        groups.traffic.clear()
        out = mlp(x)
        counted = dict(groups.traffic.num_bytes)
        groups.tp.all_reduce(out)
        torch.testing.assert_close(out, block.reference(x), rtol=1e-5, atol=2e-6)
        expected = exchange_bytes(layout, sent_rows(block, topology, inputs, placement), rank, 4)
        assert counted["counts"] == expected["counts"]
        assert counted["all_to_all"] == expected["dispatch"] + expected["combine"], (counted, expected)
    balancer, x = ExpertBalancer({0: mlp}, groups.ep), tokens(9, seed=rank // topology.tp)
    plan = balancer.balance(0)
    others = ExpertPlacement(8, mlp.placement.slots[::-1])
    mlp.place(others, move_experts(plan_moves(mlp.placement, others), mlp.mlps, groups.ep))
    out = mlp(x)
    groups.tp.all_reduce(out)
    torch.testing.assert_close(out, block.reference(x), rtol=1e-5, atol=2e-6)
    plans = groups.ep.all_gather(torch.tensor(others.slots if plan is None else plan.placement.slots))
    assert (plans == plans[0]).all()
    groups.control.barrier()
    groups.close()


def sent_rows(block: Block, topology: Topology, inputs: list[torch.Tensor], placement) -> list[list[int]]:
    """[from][to] tokens, by the rules alone."""
    table, rows = placement.turn_table(), [[0] * topology.ep for _ in range(topology.ep)]
    for place in topology.places():
        x = inputs[place.dp_rank]
        longer, size = len(x) % topology.tp, len(x) // topology.tp
        begin = place.tp_rank * size + min(place.tp_rank, longer)
        chosen = block.router()(x[begin : begin + size + (place.tp_rank < longer)])[0].tolist()
        for token, experts in enumerate(chosen):
            column = (place.rank + token) % len(table[0])
            for to in {placement.rank_of(table[expert][column]) for expert in experts}:
                rows[place.rank][to] += 1
    return rows


if __name__ == "__main__":
    own_rank, size, tp, store_port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    main(own_rank, Topology(tp=tp, ep=size), store_port)
