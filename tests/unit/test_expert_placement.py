"""Experts on ranks: even slots, copies of hot experts, level load, few moves."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.errors import ConfigError
from warmroot.cluster.expert_balance import ExpertLoads, balanced_placement, copy_counts, improved_placement
from warmroot.cluster.expert_moves import align_placement, plan_moves, plan_rebalance
from warmroot.cluster.expert_placement import ExpertPlacement, initial_placement, level


def zipf(num_experts: int, exponent: float = 1.0) -> list[float]:
    """Loads of a skewed router; the order is scattered over the experts."""
    loads = [0.0] * num_experts
    for place in range(num_experts):
        loads[(place * 37 + 11) % num_experts] = 1000.0 / (place + 1) ** exponent
    return loads


@st.composite
def problems(draw):
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 16))
    most = -(-experts // ranks)
    slots = draw(st.integers(most, experts))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return loads, ranks, slots


def check(placement: ExpertPlacement) -> None:
    assert {len(rank) for rank in placement.slots} == {placement.slots_per_rank}
    assert all(len(set(rank)) == len(rank) for rank in placement.slots)
    assert {expert for rank in placement.slots for expert in rank} == set(range(placement.num_experts))


def test_initial_placement():
    assert initial_placement(8, 2).slots == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert initial_placement(6, 4, 2).slots == ((0, 1), (2, 3), (4, 5), (0, 1))
    assert initial_placement(4, 8, 4).slots == ((0,), (1,), (2,), (3,)) * 2


@pytest.mark.parametrize(
    ("sizes", "key", "words"),
    [
        ((60, 8, 0), "expert_parallel_size", r"60 experts; 1, 2, 3, 4, 5, 6, 10, .* or set num_redundant_experts to 4"),
        (
            (64, 8, 3),
            "num_redundant_experts",
            r"64 experts and 3 copies do not fill 8 ranks evenly; 0, 8, 16, 24, \.\.\.",
        ),
        ((64, 1, 8), "num_redundant_experts", r"evenly; 0 would"),
        ((8, 2, 10), "num_redundant_experts", r"evenly; 0, 2, 4, 6, \.\.\. would"),
    ],
)
def test_what_cannot_be_spread_is_refused(sizes, key, words):
    with pytest.raises(ConfigError, match=words) as refused:
        initial_placement(*sizes)
    assert refused.value.param == key


def test_copies_take_turns():
    placement = ExpertPlacement(4, ((0, 1), (0, 2), (0, 3)))
    assert placement.copies() == ((0, 2, 4), (1,), (3,), (5,))
    assert placement.turn_table() == ((0, 2, 4), (1, 1, 1), (3, 3, 3), (5, 5, 5))
    uneven = ExpertPlacement(4, ((0, 1, 2), (0, 1, 3), (0, 2, 3))).turn_table()
    assert [sorted(map(row.count, set(row))) for row in uneven] == [[2, 2, 2], [3, 3], [3, 3], [3, 3]]
    assert placement.rank_loads([30, 1, 2, 3]) == [11, 12, 13]
    assert placement.imbalance([30, 1, 2, 3]) == pytest.approx(13 * 3 / 36)
    assert placement.imbalance([0, 0, 0, 0]) == 1.0


def test_least_loaded_copies_fill_the_gaps():
    placement = ExpertPlacement(4, ((0, 1), (0, 2), (0, 3)))
    shares = placement.least_loaded_shares([30, 20, 5, 1])
    assert shares == [0, 20, 13, 5, 17, 1]  # ranks: 20, 18, 18
    assert placement.least_loaded_shares([0, 0, 0, 0]) == [0] * 6


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 60))
def test_level_is_pouring_water(loads, amount):
    shares = level(loads, amount)
    assert sum(shares) == amount
    assert min(shares) >= 0
    expected = list(loads)
    for _ in range(amount):
        expected[expected.index(min(expected))] += 1
    assert sorted(load + share for load, share in zip(loads, shares, strict=True)) == sorted(expected)


def test_hot_experts_get_the_copies():
    assert copy_counts([100, 10, 10, 1], 4, 6) == [3, 1, 1, 1]
    assert copy_counts([100, 10, 10, 1], 2, 6) == [2, 2, 1, 1]
    assert copy_counts([5, 5], 1, 2) == [1, 1]


@settings(deadline=None)
@given(problems())
def test_balanced_placements_are_whole(problem):
    loads, ranks, slots = problem
    placement = balanced_placement(loads, ranks, slots)
    check(placement)
    counts = Counter(expert for rank in placement.slots for expert in rank)
    assert [counts[expert] for expert in range(len(loads))] == copy_counts(loads, ranks, ranks * slots)
    assert placement == balanced_placement(loads, ranks, slots)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "exponent"),
    [(64, 8, 8, 1.0), (64, 8, 16, 1.2), (128, 16, 16, 1.0), (256, 8, 32, 1.0), (60, 4, 4, 1.0), (8, 2, 2, 1.0)],
)
def test_a_skewed_load_is_levelled_by_redundant_copies(experts, ranks, redundant, exponent):
    loads = zipf(experts, exponent)
    before = initial_placement(experts, ranks, redundant)
    plan = plan_rebalance(before, loads)
    assert plan is not None
    assert plan.imbalance_before == before.imbalance(loads) > 1.25
    assert plan.imbalance_after == pytest.approx(plan.placement.imbalance(loads))
    assert plan.imbalance_after <= 1.15
    check(plan.placement)


def test_without_copies_one_hot_expert_cannot_be_shared():
    loads = zipf(64)
    assert balanced_placement(loads, 8, 8).imbalance(loads) > 1.6
    assert balanced_placement(loads, 8, 9).imbalance(loads) <= 1.05


def test_a_mended_placement_moves_few_experts():
    loads = zipf(64)
    first = plan_rebalance(initial_placement(64, 8, 8), loads)
    drifted = [load * (2.5 if expert % 7 == 0 else 1.0) for expert, load in enumerate(loads)]
    again = plan_rebalance(first.placement, drifted, goal=1.05)
    assert len(first.moves) < 72 / 3
    assert len(again.moves) < 72 / 6
    assert again.imbalance_after <= 1.05 < again.imbalance_before
    anew = align_placement(first.placement, balanced_placement(drifted, 8, 9))
    assert len(again.moves) < len(plan_moves(first.placement, anew))


@settings(deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_mended_placements_are_whole(problem, random):
    loads, ranks, slots = problem
    start = balanced_placement(random.sample(loads, len(loads)), ranks, slots)
    mended = improved_placement(start, loads, 1.0)
    check(mended)
    counts = Counter(expert for rank in mended.slots for expert in rank)
    assert [counts[expert] for expert in range(len(loads))] == copy_counts(loads, ranks, ranks * slots)


def test_a_level_load_moves_nothing():
    assert plan_rebalance(initial_placement(16, 4), [1.0] * 16) is None


def apply(old: ExpertPlacement, moves) -> tuple[tuple[int, ...], ...]:
    slots = [list(rank) for rank in old.slots]
    for move in moves:
        assert old.slots[move.source][move.source_slot] == move.expert
        slots[move.target][move.target_slot] = move.expert
    return tuple(tuple(rank) for rank in slots)


@settings(deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_moves_lead_from_the_old_placement_to_the_new(problem, random):
    loads, ranks, slots = problem
    old = balanced_placement(loads, ranks, slots)
    new = align_placement(old, balanced_placement(random.sample(loads, len(loads)), ranks, slots))
    check(new)
    moves = plan_moves(old, new)
    assert apply(old, moves) == new.slots
    lacking = sum(len(set(after) - set(before)) for before, after in zip(old.slots, new.slots, strict=True))
    assert len(moves) == lacking
    assert all(move.source != move.target for move in moves)


@settings(deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_no_renaming_of_ranks_moves_less(problem, random):
    loads, ranks, slots = problem
    old = balanced_placement(loads, ranks, slots)
    new = balanced_placement(random.sample(loads, len(loads)), ranks, slots)
    fewest = min(
        sum(len(set(after) - set(before)) for before, after in zip(old.slots, order, strict=True))
        for order in (permutations(new.slots) if ranks <= 4 else [new.slots])
    )
    moves = len(plan_moves(old, align_placement(old, new)))
    assert moves == fewest if ranks <= 4 else moves <= fewest


def test_senders_take_turns():
    old = ExpertPlacement(4, ((0, 1), (0, 1), (2, 3), (2, 3)))
    new = ExpertPlacement(4, ((0, 1), (2, 3), (0, 1), (2, 3)))
    moves = plan_moves(old, align_placement(old, new))
    assert not moves
    moves = plan_moves(old, ExpertPlacement(4, ((0, 2), (0, 2), (2, 3), (2, 3))))
    assert [(move.expert, move.source, move.target) for move in moves] == [(2, 2, 0), (2, 3, 1)]


def test_loads_fade():
    loads = ExpertLoads(2, 3, half_life=2)
    loads.record(1, [4, 0, 8])
    loads.record(1, [0, 1, 0], steps=2)
    assert loads.loads(1) == pytest.approx((2, 1, 4))
    assert loads.loads(0) == (0, 0, 0)
