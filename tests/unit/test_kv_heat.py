"""Heat: which shared beginnings save how many prompt tokens per second."""

import random

import pytest
from manual_clock import ManualClock

from warmroot.cluster.ids import BlockHash
from warmroot.kv_store.announcements import pack_hot, unpack_hot
from warmroot.kv_store.hashing import pack_tokens, unpack_tokens
from warmroot.kv_store.heat import MOST_TOKENS, HeatWindow
from warmroot.kv_store.hot_prefixes import HotPrefix

ROOT = BlockHash(b"n" * 16)
BLOCK = 4
SYSTEM = list(range(8))


class Heat:
    """A window of 100 s, 100 s after its start."""

    def __init__(self, **options):
        self.clock = ManualClock()
        self.window = HeatWindow(self.clock, 100.0, **options)
        self.clock.now = 100.0

    def note(self, tokens, cached=None, salt="", busy_s=0.0, block_size=BLOCK):
        cached = len(tokens) if cached is None else cached
        self.window.note(ROOT, block_size, salt, pack_tokens(tokens), cached, busy_s)

    def hottest(self, limit=16):
        return [(unpack_tokens(one.tokens), one.heat, one.load) for one in self.window.hottest(limit)]


def test_a_system_prompt_is_hotter_than_what_follows_it():
    heat = Heat()
    for user in range(10):
        heat.note([*SYSTEM, *range(100 * user, 100 * user + 8)], busy_s=2.0)
    assert heat.hottest() == [(SYSTEM, 10 * 8 / 100.0, 0.2)]


def test_a_conversation_counts_for_what_it_saves_beyond_its_system_prompt():
    heat = Heat()
    long = [*SYSTEM, *range(500, 520)]
    for _ in range(3):
        heat.note(long)
    for user in range(5):
        heat.note([*SYSTEM, *range(100 * user + 1000, 100 * user + 1004)])
    # 3 * 28 saved by the conversation, 5 * 8 by the system prompt for all others
    assert heat.hottest() == [(long, 0.84, 0.0), (SYSTEM, 0.64, 0.0)]
    assert heat.hottest(1) == [(long, 0.84, 0.0)]


def test_what_only_one_request_has_is_not_shared():
    heat = Heat()
    heat.note(list(range(400)))
    assert heat.hottest() == []


def test_a_chain_of_growing_prompts_is_one_prefix():
    heat = Heat()
    for length in (8, 16, 24):
        heat.note(list(range(length)))
    # two of three reach 16 tokens: 32 saved, where all three reach 8: 24, and then the third adds its own 8
    assert heat.hottest() == [(list(range(16)), 0.32, 0.0), (list(range(8)), 0.24, 0.0)]


def test_only_whole_cached_blocks_count():
    heat = Heat()
    for _ in range(2):
        heat.note(list(range(10)), cached=7)
        heat.note(list(range(50, 60)), cached=3)
    assert heat.hottest() == [([0, 1, 2, 3], 0.08, 0.0)]


def test_tenants_and_block_sizes_are_apart():
    heat = Heat()
    for salt, size in (("", 4), ("1:a:", 4), ("1:b:", 4), ("", 8)):
        for _ in range(2):
            heat.note(SYSTEM, salt=salt, block_size=size)
    assert sorted((one.salt, one.block_size) for one in heat.window.hottest(16)) == [
        ("", 4),
        ("", 8),
        ("1:a:", 4),
        ("1:b:", 4),
    ]


def test_what_was_long_ago_is_forgotten():
    heat = Heat()
    for _ in range(4):
        heat.note(SYSTEM)
    heat.clock.now += 99.0
    assert len(heat.hottest()) == 1
    heat.clock.now += 2.0
    assert heat.hottest() == []


def test_many_requests_shorten_the_window_and_a_few_at_once_are_no_rate():
    heat = Heat(most_samples=64)
    for _ in range(200):
        heat.clock.now += 0.5
        heat.note(SYSTEM)
    assert heat.hottest() == [(SYSTEM, pytest.approx(64 * 8 / 31.5), 0.0)]
    young = HeatWindow(clock := ManualClock(), 100.0)
    clock.now = 0.1
    for _ in range(4):
        young.note(ROOT, BLOCK, "", pack_tokens(SYSTEM), 8, 0.0)
    assert [one.heat for one in young.hottest(1)] == [4 * 8 / 10.0]


def test_memory_is_bounded():
    heat = Heat()
    for _ in range(2):
        heat.note(list(range(3 * MOST_TOKENS)))
    ((tokens, _, _),) = heat.hottest()
    assert len(tokens) == MOST_TOKENS


def test_every_prefix_is_as_hot_as_counting_says():
    rng = random.Random(0)
    prompts = [[rng.randrange(2) for _ in range(4 * rng.randrange(1, 9))] for _ in range(200)]
    heat = Heat()
    for prompt in prompts:
        heat.note(prompt)
    found = heat.hottest(50)
    assert len(found) > 10
    for tokens, measured, _ in found:
        with_it = sum(prompt[: len(tokens)] == tokens for prompt in prompts)
        assert with_it > 1
        assert measured == pytest.approx(with_it * len(tokens) / 100.0)
    assert len({tuple(tokens) for tokens, *_ in found}) == len(found)


def test_the_wire_keeps_everything():
    prefix = HotPrefix(ROOT, 16, pack_tokens(list(range(16))), 3.5, 0.25, "1:a:")
    assert unpack_hot(pack_hot([prefix])) == [prefix]
