"""The simulated replica against its own cost curves, by hand."""

import heapq
from dataclasses import replace

import pytest

from warmroot.deploy.simulate.block_cache import NO_PARENT, BlockCache
from warmroot.deploy.simulate.costs import ReplicaCosts
from warmroot.deploy.simulate.replica import SimulatedReplica
from warmroot.deploy.simulate.trace import TraceRequest

COSTS = ReplicaCosts(
    prefill_fixed_s=1.0,
    prefill_token_s=0.01,
    prefill_square_s=0.0,
    decode_fixed_s=0.1,
    decode_usage_s=1.0,
    decode_usage_square_s=0.0,
    kv_tokens=1000,
    max_num_seqs=4,
    max_num_batched_tokens=100,
)


class World:
    def __init__(self, costs=COSTS):
        self.now, self.queue, self.first, self.end, self.loads = 0.0, [], {}, {}, []
        self.stored, self.removed, self.count = [], [], 0
        self.cache = BlockCache(
            costs.kv_tokens // 10, lambda parent, ids: self.stored.append((parent, list(ids))), self.removed.extend
        )
        self.replica = SimulatedReplica(
            costs,
            10,
            self.cache,
            lambda: self.now,
            self.schedule,
            lambda s: self.first.setdefault(s.tag, (self.now, s.cached_tokens)),
            lambda s: self.end.setdefault(s.tag, self.now),
            self.loads.append,
        )

    def schedule(self, delay, call):
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay, self.count, call))

    def at(self, time, tag, tokens, output, ids):
        self.schedule(time - self.now, lambda: self.replica.submit(TraceRequest(time, tokens, output, tuple(ids)), tag))

    def run(self):
        while self.queue:
            self.now, _, call = heapq.heappop(self.queue)
            call()
        return self


def test_one_request_takes_its_prefill_and_its_decode_steps():
    world = World()
    world.at(0.0, "a", 50, 3, range(5))
    world.run()
    assert world.first["a"] == (pytest.approx(1.5), 0)
    # 51 tokens of a thousand, then one more: 0.1 + usage.
    assert world.end["a"] == pytest.approx(1.5 + (0.1 + 0.051) + (0.1 + 0.052))
    assert world.stored == [(NO_PARENT, [0, 1, 2, 3, 4])]


def test_a_shared_prefix_is_read_by_each_that_decodes():
    world = World(replace(COSTS, prefill_fixed_s=0.0))
    for tag in "ab":
        world.at(0.0, tag, 50, 3, range(5))
    world.run()
    # b computes one token while a reads 51; then a reads 52 and b 51, though they hold 50 of these together.
    assert world.end["a"] == pytest.approx(0.5 + (0.01 + 0.151) + (0.1 + 0.103))
    assert world.end["b"] == pytest.approx(world.end["a"] + 0.152)


def test_a_long_prompt_is_computed_in_chunks_and_a_warm_one_is_not():
    world = World()
    world.at(0.0, "cold", 250, 1, range(25))
    world.at(100.0, "warm", 250, 1, range(25))
    world.at(200.0, "half", 250, 1, [*range(12), *range(100, 113)])
    world.run()
    assert world.first["cold"] == (pytest.approx(3 + 2.5), 0)
    assert world.first["warm"] == (pytest.approx(100 + 1.01), 249)
    assert world.first["half"] == (pytest.approx(200 + 2 + 1.3), 120)


def test_an_arrival_cuts_a_run_of_decode_steps_at_the_end_of_a_step():
    costs = ReplicaCosts(**{**dict.fromkeys(("decode_usage_s", "decode_usage_square_s"), 0.0), "decode_fixed_s": 0.5})
    world = World(costs)
    world.at(0.0, "a", 10, 100, range(1))
    world.at(10.2, "b", 10, 1, range(50, 51))
    world.run()
    prefill = costs.prefill_s(10)
    began = prefill + 0.5 * 21  # 20 steps done at 10.2 and one under way
    assert world.first["b"][0] == pytest.approx(began + prefill + 0.5)
    assert world.end["a"] == pytest.approx(prefill + 99 * 0.5 + prefill)


def test_runs_of_decode_steps_are_as_exact_as_single_ones():
    costs = ReplicaCosts()
    usage, growth = 0.3, 1e-4
    single = sum(costs.decodes_s(1, 3, usage + n * growth, 0.0) for n in range(500))
    assert costs.decodes_s(500, 3, usage, growth) == pytest.approx(single)


def test_what_was_used_least_lately_goes_first_and_tails_before_heads():
    world = World(ReplicaCosts(kv_tokens=100, max_num_batched_tokens=100))
    world.at(0.0, "a", 50, 1, range(5))
    world.at(50.0, "b", 40, 1, range(10, 14))
    world.at(100.0, "c", 30, 1, range(20, 23))
    world.run()
    assert world.removed == [4, 3]
    assert world.cache.leading([0, 1, 2, 3, 4]) == 3
    assert sorted(world.cache.chains())[:3] == [(NO_PARENT, 0), (NO_PARENT, 10), (NO_PARENT, 20)]


def test_batch_slots_limit_who_runs():
    world = World()
    for n in range(6):
        world.at(0.0, n, 10, 5, [n])
    world.run()
    assert max(load.running for load in world.loads) == 4
    assert len(world.end) == 6 and world.replica.num_requests == 0 and world.cache.active == 0


def test_without_room_the_latest_gives_way_and_ends_all_the_same():
    world = World(ReplicaCosts(kv_tokens=100, max_num_batched_tokens=100))
    world.at(0.0, "a", 40, 60, range(4))
    world.at(0.1, "b", 40, 60, range(10, 14))
    world.run()
    assert set(world.end) == {"a", "b"} and world.end["a"] < world.end["b"]
    assert world.cache.active == 0 and world.replica.num_requests == 0


def test_new_tokens_take_longer_behind_a_context():
    world = World(replace(COSTS, prefill_context_s=1e-4))
    world.at(0.0, "cold", 150, 1, range(15))
    world.at(9.0, "warm", 150, 1, (*range(10), *range(90, 95)))
    world.run()
    cold = 1 + 1 + (1 + 0.5 + 1e-4 * 50 * 100)
    assert world.first["cold"] == (pytest.approx(cold), 0)
    assert world.first["warm"] == (pytest.approx(9 + 1 + 0.5 + 1e-4 * 50 * 100), 100)
    assert replace(COSTS, prefill_context_s=1e-4).prompt_s(150) == pytest.approx(cold)
