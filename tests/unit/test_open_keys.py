"""Which blocks have keys in 16 bits, and for how long."""

import numpy as np
import torch

from warmroot.actors.attention.open_keys import OpenKeys

SIZE = 4


def opened(num_blocks=400):
    return OpenKeys(num_blocks, (1, 2, SIZE), 2, torch.device("cpu"))


def write(keys, *blocks):
    """One step of one sequence over (block, first, end) each."""
    slots = [block * SIZE + offset for block, first, end in blocks for offset in range(first, end)]
    return keys.prepare(np.array(slots), np.array([len(slots)]))


def is_open(keys, *blocks):
    return [int(keys.table[block]) >= 0 for block in blocks]


def test_blocks_of_a_step_have_pages_of_their_own():
    keys = opened()
    assert write(keys, (7, 0, 4), (3, 0, 4), (9, 0, 2)) == {}
    assert len({int(keys.table[block]) for block in (7, 3, 9)}) == 3
    assert is_open(keys, 7, 3, 9, 8) == [True, True, True, False]


def test_blocks_deep_in_a_prompt_are_closed_by_the_next_step():
    """The last 32 tokens of a step may be drafts, which are taken back."""
    keys = opened()
    write(keys, *((block, 0, 4) for block in range(1, 13)), (20, 0, 2))
    write(keys, (20, 2, 3))
    assert is_open(keys, *range(1, 13), 20) == [False] * 4 + [True] * 9


def test_each_sequence_of_a_step_has_last_tokens():
    keys = opened()
    slots = [block * SIZE + offset for block in (*range(1, 13), *range(21, 33)) for offset in range(4)]
    keys.prepare(np.array(slots), np.array([48, 96]))
    write(keys, (50, 0, 1))
    assert is_open(keys, *range(1, 13)) == is_open(keys, *range(21, 33)) == [False] * 4 + [True] * 8


def test_further_passes_of_a_step_close_nothing():
    keys = opened()
    write(keys, (7, 0, 3))
    write(keys, (7, 3, 4), (8, 0, 1))
    keys.holds = True
    for position in range(1, 4):
        for _ in range(10):
            write(keys, (8, position, position + 1))
    assert is_open(keys, 7) == [True]


def test_blocks_completed_by_few_tokens_can_be_written_again_for_a_while():
    keys = opened()
    write(keys, (7, 0, 3))
    write(keys, (7, 3, 4), (8, 0, 1))
    assert write(keys, (7, 3, 4)) == {}
    for _ in range(8):
        write(keys, (8, 0, 1))
    assert is_open(keys, 7) == [True]
    write(keys, (8, 0, 1))
    assert is_open(keys, 7) == [False]


def test_blocks_that_go_on_without_a_page_are_reported():
    keys = opened()
    assert write(keys, (5, 3, 4), (6, 0, 1)) == {5: 3}
    assert write(keys, (6, 1, 2)) == {}


def test_unfinished_blocks_are_let_go_one_by_one_the_oldest_first():
    keys = opened()
    for block in range(1, 101):
        write(keys, (block, 0, 1))
    still = [block for block in range(1, 101) if is_open(keys, block) == [True]]
    assert still == list(range(101 - len(still), 101))
    assert len(still) == 1 + 2 + 32


def test_more_pages_keep_what_there_was():
    keys = opened()
    write(keys, (1, 0, 1))
    keys.pages[1][int(keys.table[1])] = 3.0
    before = keys.num_pages
    write(keys, *((block, 0, 4) for block in range(2, 60)))
    assert keys.num_pages > before
    assert (keys.pages[1][int(keys.table[1])] == 3.0).all()
    assert len({int(keys.table[block]) for block in range(1, 60)}) == 59
