"""Bytes between ranks, against numbers worked out by hand and against counted routings."""

from itertools import combinations

import pytest
from layout_models import LLAMA_70B, MOE, OLMOE, SPECS, layout, model

from warmroot.cluster.step_traffic import (
    Transfer,
    combine_row_bytes,
    dispatch_row_bytes,
    exchange_bytes,
    expected_reach,
    step_traffic,
)


def traffic(cut, rank: int, tokens: int = 10, sampled: int = 3) -> dict[str, Transfer]:
    return {t.purpose: t for t in step_traffic(cut, rank, tokens=tokens, sampled=sampled, activation_bytes=2)}


def test_a_lone_rank_sends_nothing():
    assert traffic(layout(LLAMA_70B), 0) == {}
    assert traffic(layout(MOE), 0) == {}


def test_tensor_parallel_ranks_reduce_twice_a_layer():
    cut = layout(LLAMA_70B, tp=4)
    found = traffic(cut, 1)
    hidden = 10 * 8192 * 2
    assert {purpose: (t.count, t.payload) for purpose, t in found.items()} == {
        "embedding": (1, hidden),
        "attention": (80, hidden),
        "mlp": (80, hidden),
        "logits": (1, 3 * 32064 * 4),
    }
    assert found["mlp"].sent_bytes == 80 * hidden * 2 * 3 / 4
    assert found["logits"].sent_bytes == 3 * 32064 * 4
    assert "logits" not in traffic(cut, 0)


def test_parts_of_the_vocabulary_are_gathered_as_wide_as_the_widest():
    cut = layout(model(vocab_size=101), tp=4)
    assert [len(rank.cuts["vocab"]) for rank in cut.ranks] == [26, 25, 25, 25]
    assert {traffic(cut, rank)["logits"].payload for rank in (1, 2, 3)} == {3 * 26 * 4}


def test_bytes_per_step_and_layer():
    found = traffic(layout(LLAMA_70B, tp=2, pp=2), 3)
    assert (found["mlp"].layer_bytes, found["mlp"].step_bytes) == (10 * 8192 * 2, 39 * 10 * 8192 * 2)
    assert (found["logits"].layer_bytes, found["logits"].step_bytes) == (None, 3 * 64128 * 4)


def test_stages_hand_hidden_states_on():
    cut = layout(LLAMA_70B, tp=2, pp=2)
    first, last = traffic(cut, 1), traffic(cut, 3)
    assert (first["hidden"].operation, first["hidden"].sent_bytes) == ("send", 10 * 8192 * 2)
    assert (first["attention"].count, last["attention"].count) == (41, 39)
    assert ("embedding" in first, "embedding" in last) == (True, False)
    assert ("hidden" in last, "logits" in last) == (False, True)
    assert list(traffic(layout(LLAMA_70B, pp=2), 0)) == ["hidden"]


def test_norms_over_all_heads_need_sums():
    found = traffic(layout(OLMOE, tp=2), 0)
    assert (found["qk_norm"].count, found["qk_norm"].payload) == (4, 10 * 2 * 4)


def test_experts_inside_tensor_parallelism_send_nothing_more():
    assert traffic(layout(MOE, tp=4, ep=2), 1) == traffic(layout(MOE, tp=4), 1)


def test_tokens_travel_where_attention_is_data_parallel():
    """Of 8 experts 4 are elsewhere: with two choices a token has one of them with chance 1 - C(4,2) / C(8,2)."""
    cut = layout(MOE, ep=2)
    reach = 1 - 6 / 28
    assert expected_reach(cut) == pytest.approx([reach, reach])
    found = traffic(cut, 1)
    assert set(found) == {"counts", "dispatch", "combine"}
    assert {t.count for t in found.values()} == {3}  # sparse layers
    assert (dispatch_row_bytes(cut, 2), combine_row_bytes(cut, 2)) == (64 * 2 + 2 * 8, 128)
    assert found["counts"].payload == 8
    assert found["dispatch"].payload == pytest.approx(10 * reach * 144)
    assert found["combine"].payload == pytest.approx(10 * reach * 128)


def test_a_tp_group_shares_the_sending():
    one, four = traffic(layout(MOE, ep=4), 0), traffic(layout(MOE, tp=2, ep=4), 0)
    assert four["dispatch"].payload == pytest.approx(one["dispatch"].payload / 2)
    assert (four["mlp"].count, four["mlp"].group_size) == (4, 2)


@pytest.mark.parametrize(("ep", "redundant"), [(2, 0), (4, 0), (4, 4), (8, 8)])
def test_expected_reach_is_the_mean_over_all_routings(ep, redundant):
    cut = layout(MOE, ep=ep, num_redundant_experts=redundant)
    placement, routings = cut.placement, list(combinations(range(8), 2))
    ranks_of = [[placement.rank_of(copy) for copy in copies] for copies in placement.copies()]
    for rank in range(ep):
        away = [1 - ranks.count(rank) / len(ranks) for ranks in ranks_of]
        spared = sum(away[first] * away[second] for first, second in routings) / len(routings)
        assert expected_reach(cut)[rank] == pytest.approx(1 - spared)


def test_exact_bytes_of_given_rows():
    cut = layout(MOE, ep=4)
    rows = [[5, 1, 2, 3], [0, 9, 0, 4], [7, 0, 0, 0], [1, 1, 1, 1]]
    assert exchange_bytes(cut, rows, 0, 2) == {"counts": 24, "dispatch": 6 * 144, "combine": 8 * 128}
    sent = [exchange_bytes(cut, rows, rank, 2) for rank in range(4)]
    assert sum(s["dispatch"] for s in sent) / 144 == sum(s["combine"] for s in sent) / 128


def test_dense_models_reach_no_expert():
    assert expected_reach(layout(SPECS["dense"])) == [0.0]
