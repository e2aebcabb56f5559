"""Which guesses a tree of a recurrent head is made of, and where it grows."""

from math import log

from warmroot.actors.engine.draft_tree import ROOT, Draft
from warmroot.actors.runner.recurrent_drafts import GrowingTree


def logs(*probabilities: float) -> list[float]:
    return [log(probability) for probability in probabilities]


def test_the_likeliest_branches_are_kept_in_order():
    tree = GrowingTree(4)
    tree.grow(ROOT, [7, 8, 9], logs(0.5, 0.3, 0.1))
    assert tree.tips() == [0, 1], "0.1 is too unlikely to bring anything behind it"
    tree.grow(0, [1, 2], logs(0.5, 0.1))  # 0.25, 0.05
    tree.grow(1, [3, 4], logs(0.9, 0.1))  # 0.27, 0.03
    assert tree.best(0.0) == Draft((7, 8, 3, 1), (-1, -1, 1, 0))
    assert tree.best(0.26) == Draft((7, 8, 3), (-1, -1, 1))
    assert tree.best(0.6) == Draft()


def test_a_chain_says_so():
    tree = GrowingTree(3)
    tree.grow(ROOT, [7], logs(0.9))
    assert tree.tips() == [0]
    tree.grow(0, [8], logs(0.8))
    assert tree.tips() == [1]
    tree.grow(1, [9], logs(0.1))
    assert tree.best(0.0) == Draft((7, 8, 9)) and tree.best(0.5) == Draft((7, 8))


def test_it_does_not_grow_where_there_is_no_room_for_more():
    tree = GrowingTree(1)
    tree.grow(ROOT, [7, 8], logs(0.9, 0.05))
    assert tree.tips() == [] and tree.best(0.0) == Draft((7,))
