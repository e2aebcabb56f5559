"""Which guesses of a draft stand."""

from warmroot.actors.engine.draft_tree import Draft, ancestor_masks, depths

TREE = Draft((5, 6, 7, 7, 8), (-1, -1, 0, 1, 3))


def test_a_chain_stands_up_to_its_first_error():
    chain = Draft((1, 2, 3))
    assert chain.standing([1, 2, 3, 4]) == [0, 1, 2]
    assert chain.standing([1, 5, 3, 4]) == [0]
    assert Draft().standing([4]) == []
    assert chain.path([1, 2, 9]) == [0, 1] and chain.path([]) == []


def test_in_a_tree_what_is_chosen_at_a_node_is_looked_for_among_its_children():
    #  chosen at the root, and at each of the nodes
    assert TREE.standing([6, 0, 7, 0, 8, 4]) == [1, 3, 4]
    assert TREE.standing([5, 7, 7, 0, 8, 4]) == [0, 2]
    assert TREE.standing([7, 0, 0, 0, 0, 0]) == []
    assert TREE.path([6, 7, 8, 1]) == [1, 3, 4] and TREE.path([5, 7, 8]) == [0, 2]


def test_branches():
    assert [TREE.branch(node) for node in range(-1, 5)] == [[], [5], [6], [5, 7], [6, 7], [6, 7, 8]]
    assert Draft((1, 2, 3)).branch(1) == [1, 2] and Draft((1, 2)).branch(-1) == []
    assert TREE.first(3) == Draft((5, 6, 7), (-1, -1, 0)) and len(TREE) == 5


def test_masks_and_depths():
    assert ancestor_masks((-1, -1, 0, 2)) == [0b1, 0b11, 0b101, 0b1011, 0b11011]
    assert depths((-1, -1, 0, 2)) == [1, 1, 2, 3]
