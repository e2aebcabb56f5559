"""Groups and places of ranks in every combination of sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.errors import ConfigError
from warmroot.cluster.topology import RankPlace, Topology


@st.composite
def topologies(draw):
    tp, factor, pp = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    small, large = tp, tp * factor
    tp, ep = draw(st.sampled_from([(small, large), (large, small)]))
    return Topology(tp=tp, pp=pp, ep=ep)


def test_tensor_and_pipeline():
    topology = Topology(tp=2, pp=3)
    assert (topology.world_size, topology.stage_size, topology.attention_dp, topology.expert_tp) == (6, 2, 1, 2)
    assert topology.tp_groups == topology.stage_groups == [[0, 1], [2, 3], [4, 5]]
    assert topology.pp_groups == [[0, 2, 4], [1, 3, 5]]
    assert topology.ep_groups == [[rank] for rank in range(6)]
    assert topology.control_group == [0, 1, 2, 3, 4, 5]
    assert topology.place(3) == RankPlace(rank=3, stage=1, dp_rank=0, tp_rank=1, ep_rank=0, expert_tp_rank=1)
    assert [topology.next_rank(rank) for rank in range(6)] == [2, 3, 4, 5, None, None]
    assert [topology.previous_rank(rank) for rank in range(6)] == [None, None, 0, 1, 2, 3]
    assert topology.sampling_ranks == [4]


def test_experts_inside_tensor_parallelism():
    topology = Topology(tp=4, pp=2, ep=2)
    assert (topology.world_size, topology.attention_dp, topology.expert_tp) == (8, 1, 2)
    assert topology.tp_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.ep_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert not topology.exchanges_tokens
    assert [(p.ep_rank, p.expert_tp_rank) for p in topology.places()[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_data_parallel_attention_over_the_expert_ranks():
    topology = Topology(tp=2, pp=2, ep=4)
    assert (topology.world_size, topology.attention_dp, topology.expert_tp) == (8, 2, 1)
    assert topology.tp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.ep_groups == topology.stage_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.exchanges_tokens
    assert [(p.dp_rank, p.tp_rank, p.ep_rank) for p in topology.places()[4:]] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    assert topology.sampling_ranks == [4, 6]
    assert topology.attention_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]


@settings(deadline=None)
@given(topologies())
def test_groups_are_partitions_that_agree_with_places(topology):
    everyone = list(range(topology.world_size))
    kinds = {
        "tp": (topology.tp_groups, topology.tp, "tp_rank"),
        "pp": (topology.pp_groups, topology.pp, "stage"),
        "ep": (topology.ep_groups, topology.ep, "ep_rank"),
        "stage": (topology.stage_groups, topology.stage_size, None),
    }
    for groups, size, coordinate in kinds.values():
        assert sorted(rank for group in groups for rank in group) == everyone
        assert {len(group) for group in groups} == {size}
        if coordinate:
            for group in groups:
                assert [getattr(topology.place(rank), coordinate) for rank in group] == list(range(size))
    for rank in everyone:
        following = topology.next_rank(rank)
        assert (following is None) == topology.holds_head(rank)
        if following is not None:
            assert topology.previous_rank(following) == rank
            assert topology.place(following).tp_rank == topology.place(rank).tp_rank
    assert len(topology.sampling_ranks) == topology.attention_dp


@pytest.mark.parametrize(
    ("sizes", "key", "words"),
    [
        ({"tp": 0}, "tensor_parallel_size", "0 is less than 1"),
        ({"pp": -1}, "pipeline_parallel_size", "-1 is less than 1"),
        ({"tp": 4, "ep": 3}, "expert_parallel_size", r"3 neither divides .*\(4\).*; 1, 2, 4, 8, 12, \.\.\. fit"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, key, words):
    with pytest.raises(ConfigError, match=words) as refused:
        Topology(**sizes)
    assert refused.value.param == key
